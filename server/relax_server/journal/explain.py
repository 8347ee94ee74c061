"""Why each token of a trajectory was trained on, or was not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relax_sdk.trajectory import Sample, Trajectory
from relax_server.journal.finding import GroupRow
from relax_server.journal.schema import GroupState
from relax_server.journal.trained import TrainedGroup


@dataclass(frozen=True)
class ExplainedSample:
    """One of `Trajectory.samples()`, and why each of its tokens is masked or not."""

    sample: Sample
    why: list[int]
    """One index into `Explanation.reasons` for each token."""


@dataclass(frozen=True)
class Explanation:
    """Why each token of a trajectory was trained on, or was not."""

    reasons: list[str]
    """In the order of their first token."""
    samples: list[ExplainedSample]


def explain(trajectory: Trajectory, group: GroupRow, trained: TrainedGroup | None) -> Explanation:
    """Say why each token of a trajectory has its loss mask, and whether its answers were trained on.

    Args:
        trajectory: with its tokens.
        group: what became of its group.
        trained: what training made of its group; None: no record was kept.

    Raises:
        TokenError: a turn's weight versions do not cover its response.
    """
    samples = trajectory.samples()
    advantages = _advantages(trajectory, samples, trained)
    reasons: dict[str, int] = {}
    explained = []
    for number, sample in enumerate(samples):
        why = []
        for masked, text in _given(number, sample):
            if masked is not None:
                text = f"{text}: {_fate(trajectory, group, trained, advantages.get((number, masked)))}"
            why.append(reasons.setdefault(text, len(reasons)))
        explained.append(ExplainedSample(sample, why))
    return Explanation(list(reasons), explained)


def _given(number: int, sample: Sample) -> list[tuple[int | None, str]]:
    """For each token the turn that it answers in, None where it was given; and where it stands."""
    out: list[tuple[int | None, str]] = []
    first = "prompt" if number == 0 else f"prompt of turn {_first_turn(sample)}, written anew, so a new sample begins"
    before = f"not trained: {first}"
    for turn in sample.turn:
        if turn < 0:
            out.append((None, before))
            continue
        out.append((turn, f"answer of turn {turn}"))
        before = f"not trained: what came after the answer of turn {turn}, such as its observation"
    return out


def _first_turn(sample: Sample) -> int:
    return next(turn for turn in sample.turn if turn >= 0)


def _fate(trajectory: Trajectory, group: GroupRow, trained: TrainedGroup | None, advantage: float | None) -> str:
    """What training made of an answer."""
    if group.split == "warmup":
        return "an example of the format, learnt in the warm-up"
    if group.split != "train":
        return "not trained: a held-out evaluation"
    if trajectory.failure is not None:
        return f"not trained: the episode failed ({trajectory.failure})"
    if group.state == GroupState.STALE:
        return f"not trained: the group was too old (its oldest weights are of version {group.version_min})"
    if group.state == GroupState.FAILED:
        return f"not trained: the group was set aside ({group.failure})"
    if trained is not None:
        if all(member.id != trajectory.id for member in trained.trajectories):
            return f"not trained: the episode was left out of step {trained.step}"
        if advantage is None:
            return f"trained in step {trained.step}"
        told = f"trained in step {trained.step} with advantage {advantage:+.3g}"
        return told + ("" if advantage else ", so that the reward moves nothing")
    if group.state == GroupState.ACKED:
        return f"trained, and inside checkpoint {group.checkpoint}; what the step made of it was not recorded"
    if group.state == GroupState.LEASED:
        return "not trained yet: the group is with the trainer"
    return "not trained yet: the group waits for the trainer"


def _advantages(
    trajectory: Trajectory, samples: Sequence[Sample], trained: TrainedGroup | None
) -> dict[tuple[int, int], float]:
    """The mean advantage of each turn by (sample, turn), where it is known."""
    record = next((t for t in trained.trajectories if t.id == trajectory.id), None) if trained is not None else None
    found = {}
    for number, (sample, kept) in enumerate(zip(samples, record.samples if record is not None else (), strict=False)):
        turns = np.array([turn for turn in sample.turn if turn >= 0])
        if len(turns) != len(kept.advantages):
            continue  # the record is of other tokens: another version cut the samples otherwise
        for turn in np.unique(turns):
            mean = float(np.mean(kept.advantages[turns == turn]))
            if np.isfinite(mean):
                found[number, int(turn)] = mean
    return found

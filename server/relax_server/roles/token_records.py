"""What training made of each token, kept in the journal beside the steps: no step waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from relax_sdk.trajectory import Group
from relax_server.journal.base import Journal
from relax_server.journal.trained import TrainedGroup, TrainedSample, TrainedTrajectory
from relax_server.training.step_tokens import StepTokens

MAX_WAITING = 8
"""Steps whose records are still to be written; the next one waits, so that a slow disk fills no memory."""


class TokenRecords:
    """Writes the records of a run's steps in a thread of its own, in their order.

    Args:
        journal: gets them.
        run: of the groups.
    """

    def __init__(self, journal: Journal, run: str) -> None:
        self._journal, self._run = journal, run
        self._thread = ThreadPoolExecutor(1, "token records")
        self._waiting: deque[Future[None]] = deque()

    def add(self, groups: Sequence[Group], tokens: StepTokens, step: int, version: int) -> None:
        """Have the record of a step written.

        Args:
            groups: of the step.
            tokens: what it computed; not changed any more.
            step: its number.
            version: of the weights that it began with.

        Raises:
            JournalError: an earlier one could not be written.
        """
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= MAX_WAITING):
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._write, [group.id for group in groups], tokens, step, version))

    def finish(self) -> None:
        """Wait until all are written: before a checkpoint, so that no step inside one is without its record.

        Raises:
            JournalError: one could not be written.
        """
        while self._waiting:
            self._waiting.popleft().result()

    def _write(self, ids: Sequence[str], tokens: StepTokens, step: int, version: int) -> None:
        self._journal.record_trained(self._run, trained_groups(ids, tokens, step, version))


def trained_groups(ids: Sequence[str], tokens: StepTokens, step: int, version: int) -> list[TrainedGroup]:
    """The record of a step, one item per group.

    Args:
        ids: of its groups.
        tokens: what it computed.
        step: its number.
        version: of the weights that it began with.
    """
    collected = tokens.collected
    members: list[dict[str, list[int]]] = [{} for _ in ids]
    for index, (group, trajectory) in enumerate(zip(collected.group, collected.trajectories, strict=True)):
        members[group].setdefault(trajectory.id, []).append(index)
    logprobs, entropy = tokens.by_sample(tokens.logprobs), tokens.by_sample(tokens.entropy)
    advantages, gap = tokens.by_sample(tokens.advantages), tokens.by_sample(tokens.gap)

    def member(id: str, own: list[int]) -> TrainedTrajectory:
        samples = [TrainedSample(logprobs[i], entropy[i], advantages[i]) for i in own]
        return TrainedTrajectory(id, _mean([advantages[i] for i in own]), _mean([gap[i] for i in own]), samples)

    return [
        TrainedGroup(id, step, version, [member(name, own) for name, own in named.items()])
        for id, named in zip(ids, members, strict=True)
    ]


def _mean(parts: Sequence[np.ndarray]) -> float:
    """The mean of what is known; NaN where nothing is."""
    values = np.concatenate(parts)
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")

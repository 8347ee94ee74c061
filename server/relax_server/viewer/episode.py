"""One trajectory, or the whole of its group, with all that is known of every token."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from relax_sdk.errors import JournalError, TokenError
from relax_sdk.origin import NOTE
from relax_sdk.trajectory import Group, Trajectory, Turn
from relax_server.gateway.errors import unknown
from relax_server.journal.explain import ExplainedSample, Explanation, explain
from relax_server.journal.finding import GroupRow, TrajectoryQuery, TrajectoryRow
from relax_server.journal.sql import SqlJournal
from relax_server.journal.trained import TrainedGroup, TrainedSample
from relax_server.viewer.base import ViewedRun
from relax_server.viewer.folders import read_json
from relax_server.viewer.media import shown_media
from relax_server.viewer.tokens import TokenTexts, unnamed

GROUP = 4096
"""Members of a group that are shown."""
WARMUP = "warmup"
"""The split of examples, which no policy answered: there is nothing to play again."""


class _Read(NamedTuple):
    """A group as it is in the journal."""

    group: Group
    rows: dict[str, TrajectoryRow]
    """The rows of its members by id."""
    trained: TrainedGroup | None
    fate: GroupRow


class Episodes:
    """Reads trajectories of one run; the group that was read last is remembered.

    Args:
        run: whose.
        journal: of the run.
        texts: of its tokens; None: not known.
    """

    def __init__(self, run: ViewedRun, journal: SqlJournal, texts: TokenTexts | None) -> None:
        self._run, self._journal, self._texts = run, journal, texts
        self._last: _Read | None = None
        noted = read_json(run.folder / NOTE) if run.folder is not None else None
        self._weights = noted.get("weights") if isinstance(noted, dict) else None

    def trajectory(self, seq: int) -> dict[str, Any]:
        """A trajectory with its samples, token by token.

        Raises:
            ApiError: the run has none of this number.
            JournalError: it cannot be read.
        """
        row = self._row(seq)
        group, rows, trained, fate = self._group(row.group_id)
        episode = next(t for t in group.trajectories if t.id == row.id)
        explained = _explained(episode, fate, trained)
        records = _records(trained, episode, len(explained.samples))
        samples = [self._sample(sample, kept) for sample, kept in zip(explained.samples, records, strict=False)]
        return self._described(episode, row, _members(group, rows)) | {"samples": samples, "why": explained.reasons}

    def group(self, seq: int) -> dict[str, Any]:
        """The group of a trajectory: all members, without their samples.

        Raises:
            ApiError: the run has none of this number.
            JournalError: it cannot be read.
        """
        row = self._row(seq)
        group, rows, _, fate = self._group(row.group_id)
        around = _members(group, rows)
        members = [self._described(t, rows[t.id], around) for t in group.trajectories if t.id in rows]
        fields = {"group_id": row.group_id, "task_index": row.task_index, "split": row.split}
        return fields | {"state": fate.state, "failure": fate.failure, "trajectories": members}

    def _row(self, seq: int) -> TrajectoryRow:
        found = self._journal.find(self._run.run, TrajectoryQuery(after=seq - 1, sort="oldest", limit=1))
        if not found or found[0].seq != seq:
            raise unknown("trajectory", str(seq), f" in run {self._run.name!r}")
        return found[0]

    def recorded(self, seq: int) -> Trajectory:
        """A trajectory as it was committed.

        Raises:
            ApiError: the run has none of this number.
            JournalError: it cannot be read.
        """
        row = self._row(seq)
        return next(t for t in self._group(row.group_id).group.trajectories if t.id == row.id)

    def _group(self, id: str) -> _Read:
        if self._last is None or self._last.fate.id != id:
            rows = self._journal.find(self._run.run, TrajectoryQuery(group_id=id, sort="oldest", limit=GROUP))
            group, trained, fate = self._journal.fetch([id])[0], self._journal.trained(id), self._journal.group_row(id)
            self._last = _Read(group, {row.id: row for row in rows}, trained, fate)
        return self._last

    def _described(self, t: Trajectory, row: TrajectoryRow, members: list[dict[str, Any]]) -> dict[str, Any]:
        fields = ("id", "env", "env_version", "task_index", "error", "attempts", "rewards", "timings", "info")
        answers = [index for index, message in enumerate(t.messages) if message.get("role") == "assistant"]
        answered = _aligned(answers, len(t.turns))
        return {
            "seq": row.seq,
            "run": self._run.name,
            "split": row.split,
            "status": str(t.status),
            "seed": str(t.seed),  # of 63 bits, more than numbers of a browser have
            **{name: getattr(t, name) for name in (*fields, "messages")},
            **{name: getattr(row, name) for name in ("reward", "step", "advantage", "staleness", "gap", "created_at")},
            **{name: getattr(t, name) for name in ("group_id", "group_index", "group_size", "version_min", "version_max")},
            "group": members,
            "weights": self._weights,
            "media": shown_media(self._run, t),
            "turns": [self._turn(n, turn, answer) for n, (turn, answer) in enumerate(zip(t.turns, answered, strict=True))],
            "replay": self._replay(t.id) if row.split != WARMUP else None,
        }

    def _turn(self, index: int, turn: Turn, message: int | None) -> dict[str, Any]:
        sampling = dataclasses.asdict(turn.sampling) if turn.sampling is not None else {}
        if sampling.get("sampling_seed") is not None:
            sampling["sampling_seed"] = str(sampling["sampling_seed"])
        return {
            "index": index,
            "message": message,
            "finish_reason": turn.finish_reason,
            "reward": turn.reward,
            "seconds": turn.seconds,
            "engine": turn.engine if self._run.shows_paths else None,
            "prompt_tokens": len(turn.prompt_ids),
            "cached_tokens": turn.cached_tokens,
            "response_tokens": len(turn.response_ids),
            "unreadable_calls": turn.unreadable_calls,
            "sampling": sampling,
            "weight_versions": [dataclasses.asdict(span) for span in turn.weight_versions],
            "placeholders": self._texts.count_placeholders(turn.prompt_ids) if self._texts is not None else None,
        }

    def _sample(self, explained: ExplainedSample, record: TrainedSample | None) -> dict[str, Any]:
        sample = explained.sample
        mask = np.asarray(sample.loss_mask, bool)
        names = {"trainer_logprobs": "logprobs", "entropy": "entropy", "advantages": "advantages"}
        trained = {shown: _spread(getattr(record, name) if record is not None else None, mask) for shown, name in names.items()}
        return {
            "ids": sample.ids,
            "texts": self._texts.texts(sample.ids) if self._texts is not None else [unnamed(id) for id in sample.ids],
            "mask": sample.loss_mask,
            "turn": sample.turn,
            "versions": sample.versions,
            "logprobs": _spread(np.asarray(sample.logprobs)[mask], mask),
            **trained,
            "why": explained.why,
        }

    def _replay(self, id: str) -> str | None:
        if self._run.replay is None or not self._run.shows_paths:
            return None
        episode = id.removeprefix(f"{self._run.run}/")
        return shlex.join(["relax", "replay", self._run.replay, "--episode", episode])


def _members(group: Group, rows: dict[str, TrajectoryRow]) -> list[dict[str, Any]]:
    """One line about each member, in the order of the group."""
    return [
        {"seq": row.seq, "index": t.group_index, "reward": row.reward, "status": row.status, "advantage": row.advantage}
        for t in group.trajectories
        if (row := rows.get(t.id)) is not None
    ]


def _explained(episode: Trajectory, group: GroupRow, trained: TrainedGroup | None) -> Explanation:
    try:
        return explain(episode, group, trained)
    except TokenError as error:
        raise JournalError(f"trajectory {episode.id!r} cannot be shown token by token: {error}") from error


def _records(trained: TrainedGroup | None, episode: Trajectory, samples: int) -> Sequence[TrainedSample | None]:
    """What training made of each sample; None where there is no record."""
    found = next((t.samples for t in trained.trajectories if t.id == episode.id), ()) if trained is not None else ()
    return [*found, *[None] * max(0, samples - len(found))]


def _spread(values: np.ndarray | None, mask: np.ndarray) -> list[float | None]:
    """Values of the tokens with mask 1 over all tokens; null elsewhere, and where they are not known or do not fit."""
    out: list[float | None] = [None] * len(mask)
    where = np.flatnonzero(mask)
    if values is not None and len(values) == len(where):
        for index, value in zip(where.tolist(), np.asarray(values, np.float64).round(6).tolist(), strict=True):
            out[index] = value if value == value else None
    return out


def _aligned(answers: list[int], turns: int) -> list[int | None]:
    """The message of each turn's answer: examples in the prompt come before, and what was cut short has none."""
    return [*answers[max(0, len(answers) - turns) :], *[None] * max(0, turns - len(answers))]

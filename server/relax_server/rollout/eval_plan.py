"""An `EvalPlan` carried out: what the journal does not hold yet is played, and what it holds is read."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from relax_sdk.config import RunConfig
from relax_sdk.errors import ConfigError
from relax_sdk.evals.plan import TAG_COLUMNS, EvalPlan
from relax_sdk.evals.play import EvalResults
from relax_sdk.evals.report import EvalEpisode
from relax_sdk.evaluation import Played
from relax_sdk.trajectory import Group, Trajectory
from relax_server.journal.base import Journal, TrajectoryRow
from relax_server.rollout.evaluation import EvalTally, Evaluator, OnPlayed
from relax_server.rollout.group import GroupTask

PAGE = 10_000
"""Rows of the journal that are read at once."""

Known = Mapping[int, list[EvalEpisode]]
"""Episodes of each task that was played."""


async def play_plan(
    evaluator: Evaluator, journal: Journal, config: RunConfig, plan: EvalPlan, on_played: OnPlayed | None = None
) -> EvalResults:
    """Play the tasks of a plan that the journal does not hold, and those again of which an episode failed.

    A task is durable as soon as its episodes are over, so that a program that is killed loses only those under way.

    Args:
        evaluator: plays, and commits to the journal.
        journal: of the evaluation.
        config: its sampling and seed are used.
        plan: what is played.
        on_played: told after each task how far it is.

    Raises:
        ConfigError: there is no such split, or no such column of its rows.
        JournalError: the journal cannot be read or written.
    """
    rows, run = evaluator.rows, evaluator.context.run
    of = rows.within(plan.split, plan.limit)
    known, tries = await asyncio.to_thread(read_episodes, journal, run, plan.split, of)
    done = {task for task, played in known.items() if all(e.failure is None for e in played)}
    first = await rows.row(plan.split, 0)
    by, tags = tag_column(plan, first), dict[int, tuple[str, ...]]()
    rollout = config.rollout
    policy = "retry_then_count" if rollout.on_failure == "retry" else "count"

    async def tasks() -> AsyncIterator[GroupTask]:
        for index in range(of):
            if index in done and by is None:
                continue
            row = first if index == 0 else await rows.row(plan.split, index)
            tags[index] = tag_values(row, by)
            if index in done:
                continue
            label = f"{plan.version}" + (f".{tries[index] + 1}" if index in tries else "")
            id = f"{run}/{plan.split}/{label}/{index}"
            size, sampling = plan.samples, config.sampling
            yield GroupTask(id, plan.split, index, row, size, config.seed, sampling, policy, rollout.max_retries)

    before = [episode for task in done for episode in known[task]]
    tally = EvalTally(of * plan.samples, on_played, _played(before))
    if before and on_played is not None:
        on_played(_played(before, of * plan.samples))
    played = await evaluator.play_groups(tasks(), rollout.concurrency, tally, episodes_of)
    episodes = before + [episode for group in played for episode in group]
    tagged = [replace(e, tags=tags.get(e.task, ())) for e in episodes]
    return EvalResults(sorted(tagged, key=lambda e: (e.task, e.sample)), of, by)


def _played(episodes: Sequence[EvalEpisode], of: int = 0) -> Played:
    return Played(len(episodes), of, sum(episode.reward for episode in episodes), before=len(episodes))


def episodes_of(group: Group) -> list[EvalEpisode]:
    """What the report keeps of a group."""
    return [_episode(trajectory) for trajectory in group.trajectories]


def _episode(trajectory: Trajectory) -> EvalEpisode:
    return EvalEpisode(
        trajectory.id,
        trajectory.task_index,
        trajectory.group_index,
        str(trajectory.status),
        trajectory.reward,
        dict(trajectory.rewards),
        trajectory.failure,
        trajectory.error,
        tokens=trajectory.n_response_tokens,
    )


def read_episodes(journal: Journal, run: str, split: str, of: int) -> tuple[dict[int, list[EvalEpisode]], dict[int, int]]:
    """What the journal holds of an evaluation.

    Args:
        journal: of the evaluation.
        run: its name there.
        split: of the tasks.
        of: tasks, the first ones.

    Returns:
        The episodes of each task's last try, by sample; and how often each was tried again.
    """
    tries: defaultdict[int, dict[int, list[TrajectoryRow]]] = defaultdict(dict)
    offset = 0
    while page := journal.trajectories(run, "eval", PAGE, offset):
        offset += len(page)
        for row in page:
            _, its_split, label, _ = row.group_id.rsplit("/", 3)
            if its_split == split and row.task_index < of:
                again = int(label.partition(".")[2] or 0)
                tries[row.task_index].setdefault(again, []).append(row)
    known = {task: [_read(journal, row) for row in by_try[max(by_try)]] for task, by_try in tries.items()}
    for episodes in known.values():
        episodes.sort(key=lambda episode: episode.sample)
    return known, {task: max(by_try) for task, by_try in tries.items()}


def _read(journal: Journal, row: TrajectoryRow) -> EvalEpisode:
    """An episode as its row has it; why it failed is in the whole record only."""
    if row.reward is None:
        return _episode(journal.trajectory(row.id))
    sample = int(row.id.rsplit("/", 1)[1])
    return EvalEpisode(row.id, row.task_index, sample, row.status, row.reward, dict(row.rewards), tokens=row.n_tokens)


def tag_column(plan: EvalPlan, row: Mapping[str, Any]) -> str | None:
    """The column that scores are given by; None: none.

    Raises:
        ConfigError: the plan names one that a row does not have.
    """
    if plan.by is not None and plan.by not in row:
        raise ConfigError(f"by = {plan.by!r}: the rows of {plan.split!r} have no such column; there are {', '.join(row)}")
    return plan.by or next((name for name in TAG_COLUMNS if name in row), None)


def tag_values(row: Mapping[str, Any], by: str | None) -> tuple[str, ...]:
    """A row's values in a column: one, or those of a list."""
    value = None if by is None else row.get(by)
    if value is None:
        return ()
    return tuple(map(str, value)) if isinstance(value, (list, tuple, set, frozenset)) else (str(value),)

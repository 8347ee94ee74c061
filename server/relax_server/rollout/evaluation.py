"""Evaluation: tasks of a split played and made durable, and what was found: the mean reward and what it is made of."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from relax_sdk.config import SamplingParams
from relax_sdk.errors import RunError
from relax_sdk.evals.statistics import clustered_mean
from relax_sdk.evaluation import Evaluation, Played
from relax_sdk.trajectory import Group, Status, Trajectory
from relax_server.rollout.commits import Committer
from relax_server.rollout.context import RolloutContext, end_tasks
from relax_server.rollout.episode import GRACE
from relax_server.rollout.failed_attempts import FailedAttempts, Failures
from relax_server.rollout.group import GroupResult, GroupTask, play_group
from relax_server.rollout.rows import TaskRows

OnPlayed = Callable[[Played], None]
T = TypeVar("T")


class EvalTally:
    """Counts the episodes of an evaluation as they end.

    Args:
        of: so many there will be.
        on_played: told after each task.
        before: what an earlier start has played.
    """

    def __init__(self, of: int, on_played: OnPlayed | None, before: Played | None = None) -> None:
        known = before or Played(0, of, 0.0)
        self._played, self._on_played = replace(known, of=of, before=known.episodes), on_played
        self._began = time.monotonic()

    @property
    def any_usable(self) -> bool:
        """Whether an episode did not fail, also of an earlier start."""
        return self._played.episodes > self._played.failed

    def count(self, group: Group) -> None:
        """The episodes of a task are over."""
        counted = [t.reward for t in group.trajectories if t.failure is None]
        known = self._played
        self._played = replace(
            known,
            episodes=known.episodes + len(group.trajectories),
            reward=known.reward + sum(counted),
            failed=known.failed + len(group.trajectories) - len(counted),
            seconds=time.monotonic() - self._began,
        )
        if self._on_played is not None:
            self._on_played(self._played)


@dataclass(frozen=True)
class EvalResult(Evaluation):
    """An `Evaluation` with the weight versions it was played with."""

    version_min: int | None = None
    version_max: int | None = None


class Evaluator:
    """Plays evaluations and makes their groups durable, those included that failed.

    Args:
        context: shared by all episodes.
        rows: of the environment.
        committer: of the run; None: nothing is kept.
        count: told of the trajectories that did not fail.
        failed: keeps failed attempts that were tried again; None: they are only counted.
    """

    def __init__(
        self,
        context: RolloutContext,
        rows: TaskRows,
        committer: Committer | None,
        count: Callable[[Sequence[Trajectory]], None] = lambda _: None,
        failed: FailedAttempts | None = None,
    ) -> None:
        self.context = context
        self.rows = rows
        self._reading = asyncio.Lock()
        """Held by who reads a split: rows of a generator come one after another."""
        self._committer = committer
        self._count = count
        self._failed = failed
        self._labels: Counter[str] = Counter()

    async def tasks(self, split: str, limit: int, sampling: SamplingParams, seed: int, samples: int = 1) -> list[GroupTask]:
        """One task for each of the first rows of a split; who plays them makes their ids.

        Args:
            split: of the environment's tasks.
            limit: rows at most.
            sampling: of the answers.
            seed: of the run.
            samples: episodes of each.

        Raises:
            ConfigError: there is no such split.
        """
        n, config = self.rows.within(split, limit), self.context.config
        policy = "retry_then_count" if config.on_failure == "retry" else "count"
        async with self._reading:
            rows = [await self.rows.row(split, index) for index in range(n)]
        return [GroupTask("", split, i, row, samples, seed, sampling, policy, config.max_retries) for i, row in enumerate(rows)]

    async def play(self, label: str, tasks: Sequence[GroupTask], on_played: OnPlayed | None = None) -> EvalResult:
        """Play tasks.

        Args:
            label: names the evaluation; a number is added when it was used before.
            tasks: in any order; their ids are made here.
            on_played: told after each task how far it is.

        Raises:
            RunError: no episode was usable, or too many failed.
            JournalError: a group could not be written.
        """
        self._labels[label] += 1
        if self._labels[label] > 1:
            label = f"{label}.{self._labels[label] - 1}"
        tally, prefix = EvalTally(sum(task.size for task in tasks), on_played), f"{self.context.run}/{label}"
        named = [replace(task, id=f"{prefix}/{task.task_index}") for task in tasks]
        groups = await self.play_groups(_each(named), len(named), tally, lambda group: group)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        if all(trajectory.failure is not None for trajectory in trajectories):
            last = trajectories[-1].error if trajectories else "no tasks"
            where = f"evaluation of {self.context.spec.id}"
            raise RunError(f"{where}: none of {len(trajectories)} episodes was usable; the last failure: {last}")
        return summarise(trajectories)

    async def play_groups(
        self,
        tasks: AsyncIterable[GroupTask],
        at_once: int,
        tally: EvalTally,
        keep: Callable[[Group], T],
    ) -> list[T]:
        """Play groups as their tasks come.

        Args:
            tasks: with their ids.
            at_once: groups that may be under way, at most.
            tally: told of each.
            keep: what is kept of each, once it is durable.

        Returns:
            What was kept, in the order of the tasks.

        Raises:
            RunError: too many failed, see `FailureLimits`; what is under way is cancelled, and what is over was kept.
            JournalError: a group could not be written; what is under way is cancelled.
        """
        failures, env = Failures(self.context.config, self._failed), self.context.spec.id
        failures.limits.any_usable = tally.any_usable

        async def one(task: GroupTask) -> T:
            result = await play_group(self.context, task)
            group = whole_group(self.context, task, result)
            why = await failures.ended(env, result, group)
            if self._committer is not None:
                await self._committer.commit(group, "eval")
            tally.count(group)
            self._count([t for t in group.trajectories if t.failure is None])
            if why is not None:
                raise RunError(f"evaluation of {env}: {why}. Mend the environment or the endpoint, and evaluate again")
            return keep(group)

        return await _bounded(tasks, at_once, one)


async def _bounded(tasks: AsyncIterable[GroupTask], at_once: int, play: Callable[[GroupTask], Awaitable[T]]) -> list[T]:
    """Play tasks, so many at once; the first error ends all, and nothing is under way any more when it is raised."""
    places = asyncio.Semaphore(max(at_once, 1))
    playing: list[asyncio.Task[T]] = []
    errors: list[BaseException] = []

    async def one(task: GroupTask) -> T:
        try:
            return await play(task)
        except BaseException as error:
            errors.append(error)
            raise
        finally:
            places.release()

    try:
        async for task in tasks:
            await places.acquire()
            if errors:
                break
            playing.append(asyncio.create_task(one(task)))
        return list(await asyncio.gather(*playing))
    finally:
        await end_tasks(playing, 2 * GRACE)  # a group itself waits so long for its episodes


async def _each(tasks: Sequence[GroupTask]) -> AsyncIterator[GroupTask]:
    for task in tasks:
        yield task


def whole_group(context: RolloutContext, task: GroupTask, result: GroupResult) -> Group:
    """All episodes of a task, failed ones included. Where nothing of it was usable, none has an answer that counts."""
    trajectories = result.trajectories
    if result.group is None:
        cause, why = next(reversed(result.failures), "NoAnswer"), result.error or "no token was answered"
        trajectories = [t if t.failure else _failed(t, cause, why) for t in trajectories]
    return Group(task.id, context.spec.id, task.task_index, trajectories)


def _failed(trajectory: Trajectory, cause: str, why: str) -> Trajectory:
    """The same episode, as one that failed after its end."""
    info = trajectory.info | {"failure": cause}
    return replace(trajectory, status=Status.FAILED, error=why, reward=0.0, rewards={}, info=info)


def summarise(trajectories: Sequence[Trajectory]) -> EvalResult:
    """The result of an evaluation.

    Args:
        trajectories: of one or several episodes of each task. Failed ones are counted by cause and are in no mean; the interval
            is that of `relax_sdk.evals.statistics.clustered_mean`.
    """
    tasks: defaultdict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.failure is None:
            tasks[trajectory.task_index].append(trajectory)
    reward = clustered_mean([[t.reward for t in played] for played in tasks.values()])
    names = dict.fromkeys(name for played in tasks.values() for t in played for name in t.rewards)
    return EvalResult(
        mean_reward=reward.mean,
        ci95=reward.ci95,
        n=reward.n,
        components={
            name: clustered_mean([[t.rewards[name] for t in played if name in t.rewards] for played in tasks.values()]).mean
            for name in names
        },
        failures=dict(Counter(t.failure for t in trajectories if t.failure is not None)),
        trajectories=list(trajectories),
        version_min=min((v for t in trajectories if (v := t.version_min) is not None), default=None),
        version_max=max((v for t in trajectories if (v := t.version_max) is not None), default=None),
    )

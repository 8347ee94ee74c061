"""Evaluation: a split played once, and what was found: the mean reward with its interval, and what it is made of."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from relax_sdk.config import SamplingParams
from relax_sdk.errors import RunError
from relax_sdk.evaluation import Evaluation, Played
from relax_sdk.trajectory import Trajectory, mean_reward
from relax_server.rollout.commits import Committer
from relax_server.rollout.context import RolloutContext
from relax_server.rollout.group import GroupResult, GroupTask, play_group
from relax_server.rollout.rows import TaskRows

OnPlayed = Callable[[Played], None]

Z95 = 1.959964
"""The 97.5% quantile of the normal distribution."""


class EvalTally:
    """Counts the episodes of an evaluation as they end.

    Args:
        of: so many there will be.
        on_played: told after each.
    """

    def __init__(self, of: int, on_played: OnPlayed | None) -> None:
        self._played, self._on_played = Played(0, of, 0.0), on_played

    def count(self, result: GroupResult) -> None:
        reward = result.trajectories[0].reward if result.trajectories else 0.0
        self._played = replace(self._played, episodes=self._played.episodes + 1, reward=self._played.reward + reward)
        if self._on_played is not None:
            self._on_played(self._played)


@dataclass(frozen=True)
class EvalResult(Evaluation):
    """An `Evaluation` with the weight versions it was played with."""

    version_min: int | None = None
    version_max: int | None = None
    trajectories: list[Trajectory] = field(default_factory=list, repr=False)


class Evaluator:
    """Plays evaluations and makes their groups durable.

    Args:
        context: shared by all episodes.
        rows: of the environment.
        committer: of the run.
        count: told of usable trajectories.
    """

    def __init__(
        self, context: RolloutContext, rows: TaskRows, committer: Committer, count: Callable[[Sequence[Trajectory]], None]
    ) -> None:
        self._context = context
        self._rows = rows
        self._reading = asyncio.Lock()
        """Held by who reads a split: rows of a generator come one after another."""
        self._committer = committer
        self._count = count
        self._labels: Counter[str] = Counter()

    async def tasks(self, split: str, limit: int, sampling: SamplingParams, seed: int) -> list[GroupTask]:
        """One task for each of the first rows of a split; `play` makes their ids.

        Args:
            split: of the environment's tasks.
            limit: rows at most.
            sampling: of the answers.
            seed: of the run.

        Raises:
            ConfigError: there is no such split.
        """
        n, config = self._rows.within(split, limit), self._context.config
        policy = "retry_then_count" if config.on_failure == "retry" else "count"
        async with self._reading:
            rows = [await self._rows.row(split, index) for index in range(n)]
        return [GroupTask("", split, i, row, 1, seed, sampling, policy, config.max_retries) for i, row in enumerate(rows)]

    async def play(self, label: str, tasks: Sequence[GroupTask], on_played: OnPlayed | None = None) -> EvalResult:
        """Play tasks, one episode each.

        Args:
            label: names the evaluation; a number is added when it was used before.
            tasks: in any order; their ids are made here.
            on_played: told after each episode how far it is.

        Raises:
            RunError: no episode was usable.
            JournalError: a group could not be written.
        """
        self._labels[label] += 1
        if self._labels[label] > 1:
            label = f"{label}.{self._labels[label] - 1}"
        tally, prefix = EvalTally(len(tasks), on_played), f"{self._context.run}/{label}"
        playing = [asyncio.create_task(self._play(replace(t, id=f"{prefix}/{t.task_index}"), tally)) for t in tasks]
        try:
            results = await asyncio.gather(*playing)
        finally:
            for task in playing:
                task.cancel()
        if all(result.group is None for result in results):
            last = results[-1].error if results else "no tasks"
            where = f"evaluation of {self._context.spec.id}"
            raise RunError(f"{where}: none of {len(tasks)} episodes was usable; the last failure: {last}")
        failures = Counter(next(reversed(r.failures), "no tokens") for r in results if r.group is None)
        return summarise([result.trajectories[0] for result in results], failures)

    async def _play(self, task: GroupTask, tally: EvalTally) -> GroupResult:
        result = await play_group(self._context, task)
        tally.count(result)
        if result.group is not None:
            self._count(result.group.trajectories)
            await self._committer.commit(result.group, "eval")
        return result


def summarise(trajectories: Sequence[Trajectory], failures: Counter[str]) -> EvalResult:
    """The result of an evaluation.

    The interval is the normal one, `mean ± 1.96 s / sqrt(n)` with the sample standard deviation `s`; infinite for n = 1.

    Args:
        trajectories: one per task; failed ones count with reward 0.
        failures: of episodes that failed every time, by kind.
    """
    n = len(trajectories)
    mean = mean_reward(trajectories)
    spread = math.inf
    if n > 1:
        variance = sum((t.reward - mean) ** 2 for t in trajectories) / (n - 1)
        spread = Z95 * math.sqrt(variance / n)
    names = dict.fromkeys(name for t in trajectories for name in t.rewards)
    return EvalResult(
        mean_reward=mean,
        ci95=spread,
        n=n,
        components={name: sum(t.rewards.get(name, 0.0) for t in trajectories) / n for name in names},
        failures=dict(failures),
        version_min=min((v for t in trajectories if (v := t.version_min) is not None), default=None),
        version_max=max((v for t in trajectories if (v := t.version_max) is not None), default=None),
        trajectories=list(trajectories),
    )

"""The rows of an environment's tasks, read in threads: a streamed dataset may download first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_sdk.errors import ConfigError
from relax_sdk.registry import EnvSpec
from relax_sdk.tasks import TaskSplit, task_splits
from relax_server.rollout.threads import CallThreads

ROW_TIMEOUT = 300.0
"""Seconds for one row."""


class TaskRows:
    """All splits of one environment.

    Args:
        spec: the environment.
        threads: in which rows are read.

    Raises:
        ConfigError: it has no tasks.
    """

    def __init__(self, spec: EnvSpec, threads: CallThreads) -> None:
        self._env, self._threads = spec.id, threads
        self._splits: dict[str, TaskSplit] = task_splits(spec.load_tasks())

    @property
    def splits(self) -> Mapping[str, TaskSplit]:
        """The tasks by split."""
        return self._splits

    async def row(self, split: str, index: int) -> dict[str, Any]:
        """One row.

        Raises:
            ConfigError: it is not a mapping, or there are no more.
            EpisodeTimeout: it took too long.
        """
        return await self._threads.call(self._splits[split].row, index, limit=ROW_TIMEOUT)

    async def first(self, n: int) -> list[dict[str, Any]]:
        """The first rows of the train split, at most `n`; only before any is read in order.

        Raises:
            ConfigError: a row is not a mapping.
            EpisodeTimeout: it took too long.
        """
        return await self._threads.call(self._splits["train"].peek, n, limit=ROW_TIMEOUT)

    def within(self, split: str, limit: int) -> int:
        """How many rows of a split there are, at most `limit`.

        Raises:
            ConfigError: there is no such split.
        """
        if split not in self._splits:
            raise ConfigError(f"{self._env} has no {split!r} split; there are {', '.join(self._splits)}")
        rows = self._splits[split]
        return min(limit, len(rows)) if rows.finite else limit

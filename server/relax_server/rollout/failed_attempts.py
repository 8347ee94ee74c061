"""Failed attempts at episodes: kept to be looked at, also those that were tried again or dropped; too many are told."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from relax_sdk.config import RolloutConfig
from relax_sdk.errors import UnstorableError
from relax_sdk.trajectory import Group, Trajectory
from relax_server.journal.base import TrajectoryQuery
from relax_server.rollout.commits import Committer
from relax_server.rollout.failure_limits import FailureLimits
from relax_server.rollout.group import GroupResult

FAILED = "failed"
"""The split of the journal that they are in; it is never trained on or counted."""
KEPT = TrajectoryQuery(split=FAILED)
"""Finds them in the journal."""

logger = logging.getLogger(__name__)


class FailedAttempts:
    """Puts failed attempts into the journal, up to a number.

    Args:
        commit: makes a group durable in the split `FAILED`.
        known: counts what the journal has already, from earlier starts too; asked once, before the first is kept.
        limit: attempts of the run that are kept; those that come later are only counted elsewhere.
    """

    def __init__(self, commit: Callable[[Group], Awaitable[object]], known: Callable[[], Awaitable[int]], limit: int) -> None:
        self._commit, self._known, self._limit = commit, known, limit
        self._kept: int | None = None
        self._asking = asyncio.Lock()

    @classmethod
    def of_run(cls, committer: Committer, limit: int) -> FailedAttempts:
        """The keeper of failed attempts for the run that a committer belongs to."""
        return cls(lambda group: committer.commit(group, FAILED), lambda: committer.count(KEPT), limit)

    async def keep(self, env: str, attempts: Sequence[Trajectory]) -> None:
        """Keep the failed attempts of one group: their errors, what was said so far, and its tokens.

        Args:
            env: id of the environment.
            attempts: failed ones that are in no other group of the journal. What cannot be stored is left out, with a line in
                the log.

        Raises:
            JournalError: they cannot be written, or not be counted.
        """
        if not attempts:
            return
        async with self._asking:
            if self._kept is None:
                self._kept = await self._known()
        attempts = attempts[: max(self._limit - self._kept, 0)]
        if not attempts:
            return
        self._kept += len(attempts)
        first = attempts[0]
        mark = f"{FAILED}-{uuid.uuid4().hex[:8]}"  # the group, and with it each attempt, may be played again after a restart
        id = f"{first.group_id}/{mark}"
        members = [replace(t, id=f"{t.id}/{mark}-{t.attempts}", group_id=id) for t in attempts]
        try:
            await self._commit(Group(id, env, first.task_index, members))
        except UnstorableError as error:
            logger.warning("%d failed attempts of group %s are not kept: %s", len(members), first.group_id, error)


class Failures:
    """What is done about failed attempts, whoever plays: each is kept, and too many of them end what is being played.

    Args:
        config: the limits: `max_failed_groups`, `max_failed_share`.
        attempts: keeps them; None: they are only counted.
    """

    def __init__(self, config: RolloutConfig, attempts: FailedAttempts | None) -> None:
        self.limits = FailureLimits(config)
        self._attempts = attempts

    async def ended(self, env: str, result: GroupResult, group: Group | None) -> str | None:
        """Keep and count the failed attempts of a group that has ended.

        Args:
            env: id of the environment.
            result: what became of the group.
            group: what is made durable of it; failed attempts in it are not kept a second time.

        Returns:
            Why nothing more is to be played, with the commonest causes; None: it goes on.

        Raises:
            JournalError: they cannot be written.
        """
        why = self.limits.ended(result)
        if self._attempts is not None:
            await self._attempts.keep(env, result.failed_beside(group))
        return why

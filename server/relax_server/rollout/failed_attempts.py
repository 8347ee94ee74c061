"""Failed attempts of a run, kept to be looked at: also those that were tried again or dropped."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

from relax_sdk.trajectory import Group, Trajectory
from relax_server.rollout.commits import Committer

FAILED = "failed"
"""The split of the journal that they are in; it is never trained on or counted."""


class FailedAttempts:
    """Puts failed attempts into the journal, up to a number.

    Args:
        committer: of the run.
        limit: attempts of the run that are kept; those that come later are only counted elsewhere.
    """

    def __init__(self, committer: Committer, limit: int) -> None:
        self._committer, self._limit = committer, limit
        self.kept = 0
        """Attempts that the journal has, from earlier starts of the run too."""

    async def keep(self, env: str, attempts: Sequence[Trajectory]) -> None:
        """Keep the failed attempts of one group: their errors, what was said so far, and its tokens.

        Args:
            env: id of the environment.
            attempts: failed ones that are in no other group of the journal.

        Raises:
            JournalError: they cannot be written.
        """
        attempts = attempts[: max(self._limit - self.kept, 0)]
        if not attempts:
            return
        self.kept += len(attempts)
        first = attempts[0]
        mark = f"{FAILED}-{uuid.uuid4().hex[:8]}"  # the group, and with it each attempt, may be played again after a restart
        id = f"{first.group_id}/{mark}"
        members = [replace(t, id=f"{t.id}/{mark}-{t.attempts}", group_id=id) for t in attempts]
        await self._committer.commit(Group(id, env, first.task_index, members), FAILED)

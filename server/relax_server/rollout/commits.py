"""Finished groups on their way into the journal: off the event loop, and all that wait in one go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from relax_sdk.errors import EpisodeTimeout, JournalError
from relax_sdk.trajectory import Group
from relax_server.journal.apart import write_apart
from relax_server.journal.base import Journal, TrajectoryQuery
from relax_server.journal.claims import Held
from relax_server.rollout.threads import CallThreads

COMMIT_TIMEOUT = 120.0
"""Seconds for the groups that are committed in one go."""

_Place = tuple[str, str, str | None, Held | None]
"""Run, split, owner and claim."""
_Waiting = tuple[Group, _Place, asyncio.Future[bool]]
"""A group, where it belongs, and who waits for it."""


class Committer:
    """Commits groups, in the order they come.

    A group is durable when `commit` returns. Groups of one place that come while others are being written are written together
    next, by one `Journal.commit_many`. One that cannot be stored fails alone.

    Args:
        journal: to write to.
        run: name of the run that groups belong to if nothing else is said.
    """

    def __init__(self, journal: Journal, run: str) -> None:
        self.journal = journal
        self.run = run
        self._threads = CallThreads("journal", 1)
        self._waiting: list[_Waiting] = []
        self._writer: asyncio.Task[None] | None = None

    async def commit(
        self, group: Group, split: str, run: str | None = None, owner: str | None = None, held: Held | None = None
    ) -> bool:
        """Make a group durable.

        Args:
            group: finished.
            split: of its task.
            run: that it belongs to; default: this committer's.
            owner: id of the key that it was made for.
            held: the claim that it was made under, if any.

        Returns:
            False when it was there already.

        Raises:
            ClaimLost: another program has what it was made for, or that is over.
            UnstorableError: it cannot be stored, however often it is tried.
            JournalError: it could not be written; it may be all the same, if the database was slow: committing it again tells.
        """
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((group, (run or self.run, split, owner, held), done))
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())
        return await done

    async def count(self, query: TrajectoryQuery) -> int:
        """Trajectories of the run in the journal that a query finds.

        Raises:
            JournalError: the journal cannot be read.
        """
        try:
            return await self._threads.call(self.journal.count, self.run, query, limit=COMMIT_TIMEOUT)
        except EpisodeTimeout as error:
            raise JournalError(f"the journal did not answer within {COMMIT_TIMEOUT:g} s") from error

    async def close(self) -> None:
        """Wait for what is being written."""
        if self._writer is not None:
            await asyncio.gather(self._writer, return_exceptions=True)
        self._threads.close()

    async def _write(self) -> None:
        try:
            while self._waiting:
                place = self._waiting[0][1]
                batch = [item for item in self._waiting if item[1] == place]
                self._waiting = [item for item in self._waiting if item[1] != place]
                await self._write_batch(batch, place)
        finally:
            self._writer = None

    async def _write_batch(self, batch: list[_Waiting], place: _Place) -> None:
        groups = [group for group, _, _ in batch]
        results: Sequence[bool | Exception]
        try:
            results = await self._threads.call(self._commit, groups, place, limit=COMMIT_TIMEOUT)
        except EpisodeTimeout as error:
            late = JournalError(f"the journal did not take {len(groups)} groups within {COMMIT_TIMEOUT:g} s")
            late.__cause__ = error
            batch, self._waiting = batch + self._waiting, []  # those that wait for the same journal have waited long enough
            results = [late] * len(batch)
        except Exception as error:
            results = [error] * len(batch)
        for result, (_, _, done) in zip(results, batch, strict=True):
            if done.done():
                continue
            if isinstance(result, Exception):
                done.set_exception(result)
            else:
                done.set_result(result)

    def _commit(self, groups: list[Group], place: _Place) -> list[bool | Exception]:
        return write_apart(lambda part: self.journal.commit_many(part, *place), groups)

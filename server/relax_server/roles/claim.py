"""The claim of a run in its journal: taken before anything else is done, kept while the run goes on, given back at its end.

The lock on the run folder (`relax_sdk.run_lock`) refuses a second program on most machines before this is asked. The claim
also holds where two hosts share a folder whose file system has no locks, and where two folders of the same name share a
journal; and it ends the rights of processes that a killed program has left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from relax_sdk.errors import ConfigError, JournalError
from relax_sdk.run_lock import Holder, in_use
from relax_server.journal.base import Journal

BEAT_SECONDS = 2.0
"""Seconds between two signs of life."""

LAPSE_SECONDS = 15.0
"""A program on another host that gives no sign of life for so long has ended."""

LOOK_SECONDS = 0.5
"""Seconds between two looks at another program's claim."""

END_SECONDS = 5.0
"""Seconds for the journal to note that the run is given back."""


class Claim:
    """One program's claim of one run.

    Args:
        journal: of the run.
        run: its name there.
        holder: the program.
    """

    def __init__(self, journal: Journal, run: str, holder: Holder) -> None:
        self._journal, self._run, self._holder = journal, run, holder

    async def take(self, wait: Callable[[str], None]) -> None:
        """Claim the run; the same program gets it at once, also by a controller that was started again.

        Args:
            wait: told when another program must be watched for signs of life, which takes up to `LAPSE_SECONDS`.

        Raises:
            ConfigError: another program carries it out.
            JournalError: the journal cannot be written.
        """
        loop = asyncio.get_running_loop()
        first = await asyncio.to_thread(self._journal.claim, self._run, self._holder)
        if first is None:
            return
        wait(f"waiting for a sign of life of {first.holder}, which has claimed this run")
        end = loop.time() + LAPSE_SECONDS
        while loop.time() < end:
            await asyncio.sleep(LOOK_SECONDS)
            now = await asyncio.to_thread(self._journal.claim, self._run, self._holder)
            if now is None:
                return
            if now != first:
                raise ConfigError(in_use(f"journal {self._run!r}", now.holder))
        now = await asyncio.to_thread(self._journal.claim, self._run, self._holder, first)
        if now is not None:
            raise ConfigError(in_use(f"journal {self._run!r}", now.holder))

    async def keep(self, lost: Callable[[str], None]) -> None:
        """Give signs of life until cancelled.

        Args:
            lost: told, once, that another program has taken the run.
        """
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            with contextlib.suppress(JournalError):  # nobody else can take the run while the journal cannot be written
                if not await asyncio.to_thread(self._journal.beat, self._run, self._holder):
                    return lost(f"another program has taken run {self._run!r}; this one ends, and its groups are left alone")

    async def end(self) -> None:
        """Give the run back; where the journal cannot be written, the next program sees that this one has ended."""
        with contextlib.suppress(JournalError, TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await asyncio.to_thread(self._journal.end_claim, self._run, self._holder)

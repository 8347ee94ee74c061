"""Whether episodes can be begun: an engine and the database are asked, and neither can hold the answer up."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from sqlalchemy import select

from relax_sdk.errors import EpisodeTimeout, JournalError
from relax_server.api.core import ServiceCore
from relax_server.journal.schema import keys
from relax_server.rollout.threads import CallThreads

logger = logging.getLogger(__name__)

LIMIT = 2.0
"""Seconds for an engine or the database to answer."""
KEPT_SECONDS = 1.0
"""Seconds for which an answer is told again, so that asking often costs no more."""


class Readiness:
    """Asks the engines and the database of a service. Belongs to one event loop.

    Args:
        core: of the service.
    """

    def __init__(self, core: ServiceCore) -> None:
        self._core = core
        self._threads = CallThreads("readiness", 1)
        self._known: tuple[float, str | None, str] = (0.0, "not looked at yet", "")
        self._looking: asyncio.Task[tuple[str | None, str]] | None = None

    async def look(self) -> tuple[bool, str]:
        """Whether the service is ready, and why, or with what; never takes much longer than `LIMIT`."""
        core = self._core
        if core.status != "ok":
            return False, core.status
        if core.events.error is not None:
            return False, "the journal cannot be written; the service's log has the reason"
        loop = asyncio.get_running_loop()
        at, why, what = self._known
        if loop.time() - at > KEPT_SECONDS:
            if self._looking is None:
                self._looking = loop.create_task(self._ask())
                self._looking.add_done_callback(self._seen)
            why, what = await asyncio.shield(self._looking)
        return why is None, why or what

    def close(self) -> None:
        """Ask no more."""
        if self._looking is not None:
            self._looking.cancel()
        self._threads.close()

    def _seen(self, looking: asyncio.Task[tuple[str | None, str]]) -> None:
        self._looking = None
        if not looking.cancelled() and looking.exception() is None:
            self._known = asyncio.get_running_loop().time(), *looking.result()

    async def _ask(self) -> tuple[str | None, str]:
        """Why it is not ready, or None; and with what it is."""
        up, wrong = await asyncio.gather(self._engines(), self._database())
        return (wrong if up else "no engine answers"), f"{up} engines up"

    async def _engines(self) -> int:
        """How many engines answer."""
        pool = self._core.pool
        up = [engine for engine, stats in zip(pool.engines, pool.stats(), strict=True) if stats["up"]]
        found = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIMIT):
                for answer in asyncio.as_completed([engine.health(LIMIT) for engine in up]):
                    found += await answer
        return found

    async def _database(self) -> str | None:
        """Why the database does not serve; None: it does."""
        if self._threads.stuck:
            return f"the database has not answered for more than {LIMIT:g} s"
        try:
            await self._threads.call(self._read, limit=LIMIT)
        except EpisodeTimeout:
            return f"the database has not answered for {LIMIT:g} s"
        except JournalError as error:
            logger.warning("not ready: %s", error)
            return "the database does not answer as it should; the service's log has the reason"
        return None

    def _read(self) -> None:
        with self._core.journal.reading("see whether the database answers") as connection:
            connection.execute(select(keys.c.id).limit(1)).first()

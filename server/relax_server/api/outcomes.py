"""How sessions end: their trajectories on the way into the journal, tried until they are there, and what is kept of them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from relax_sdk.errors import RelaxError, UnstorableError
from relax_server.api.keys import Key
from relax_server.api.logs import FIELDS
from relax_server.gateway.digest import digest
from relax_server.gateway.errors import ApiError
from relax_server.gateway.played import over

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 15.0
"""Seconds after a try that failed until the next one that nobody has asked for."""
SAVE_SECONDS = 2.0
"""Seconds for the trajectories of what a service cancels at its end to become durable."""


@dataclass(frozen=True, slots=True)
class EndedSession:
    """What is kept of a session that is over and durable."""

    id: str
    secret: str
    """The session's own key, hashed."""
    key: Key
    """The key that opened it."""
    state: dict[str, Any]
    """The session as `GET /v1/sessions` tells it."""
    outcome: dict[str, Any]
    """What `finish` answers."""
    refused: UnstorableError | None = None
    """Why nothing was stored, and never can be: `finish` answers this instead."""

    @property
    def topic(self) -> str:
        """Topic of the session's events."""
        return f"session/{self.id}"

    @property
    def trajectory_id(self) -> str:
        """Id of the trajectory that the session became."""
        return self.outcome["trajectory_id"]

    @property
    def log_ids(self) -> dict[str, str]:
        """What log lines about it carry."""
        return {"session": self.id, "trajectory": self.trajectory_id}

    def opens_with(self, secret: str) -> bool:
        """Whether this is the session's own key."""
        return hmac.compare_digest(self.secret, digest(secret))

    async def finish(self) -> dict[str, Any]:
        """How it ended.

        Raises:
            UnstorableError: its trajectory cannot be stored.
        """
        if self.refused is not None:
            raise UnstorableError(str(self.refused), self.refused.field)
        return self.outcome

    async def cancel_and_wait(self) -> None:
        """It is over already."""

    def over(self) -> ApiError:
        """What is answered to whoever wants to go on with it."""
        error = self.outcome["error"]
        return over(self.id, self.outcome["status"] + (f": {error}" if error else ""))


class Keeping:
    """A trajectory on its way into the journal. Belongs to one event loop.

    It is written when the episode ends. A try that failed is repeated when somebody asks for the outcome, and every
    `AGAIN_SECONDS` if nobody does, for as long as the server lives.

    Args:
        write: makes it durable; doing it again after it succeeded unseen changes nothing.
        ids: what log lines about it carry.
    """

    def __init__(self, write: Callable[[], Awaitable[EndedSession]], ids: dict[str, str]) -> None:
        self._write, self._ids = write, ids
        self._begun = asyncio.Event()
        self._try: asyncio.Future[EndedSession] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Try, as the episode has ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._try = asyncio.ensure_future(self._write())
        self._try.add_done_callback(self._tried)
        self._begun.set()

    async def outcome(self) -> EndedSession:
        """Wait until the episode has ended and is durable; a try that has failed before is repeated, once.

        Raises:
            RelaxError: it could not be made durable now; the next call tries again.
        """
        await self._begun.wait()
        if self._failed:
            self.begin()
        assert self._try is not None
        try:
            return await asyncio.shield(self._try)
        except RelaxError:
            raise
        except Exception as error:
            message = f"the episode could not be stored ({type(error).__name__}; the service's log has more); finish it again"
            raise ApiError(500, message, "internal_error") from error

    async def insist(self) -> None:
        """Wait until it is durable, or until the try under way and one more have failed."""
        try:
            await self.outcome()
        except RelaxError:
            with contextlib.suppress(RelaxError):
                await self.outcome()

    @property
    def _failed(self) -> bool:
        """Whether the last try has failed."""
        tried = self._try
        return tried is not None and tried.done() and (tried.cancelled() or tried.exception() is not None)

    def _tried(self, tried: asyncio.Future[EndedSession]) -> None:
        if tried.cancelled() or (error := tried.exception()) is None:
            return
        text, trace = "the trajectory is not durable yet and is kept: %s", None if isinstance(error, RelaxError) else error
        logger.warning(text, error, exc_info=trace, extra={FIELDS: self._ids})
        self._timer = asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._again)

    def _again(self) -> None:
        if self._failed:
            self.begin()

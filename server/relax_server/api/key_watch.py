"""Keys that end while something goes on under them: connections, streams, sessions, rollouts and runs are told, and end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.websockets import WebSocket

from relax_sdk.errors import RelaxError
from relax_server.api.keys import LOCAL, KeyRing

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Seconds between two looks whether the keys in use still work."""
AT_ONCE = 32
"""Uses of a key that are told without letting the event loop do something else in between."""
LOCKED = "this service wants keys now"
UNAUTHORISED, REASON_LENGTH = 4401, 100
"""Code and characters of the reason that a WebSocket is closed with."""


class KeyWatch:
    """Tells whoever uses a key that it was revoked or has expired. Belongs to one event loop.

    All keys in use are looked up by one query, every second, so that it makes no difference which server, or which command,
    ended a key. Anonymous callers are told when the first key was made.

    Args:
        keys: that there are.
        ask: calls what waits for the database.
        locked: asks whether callers must show a key.
    """

    def __init__(self, keys: KeyRing, ask: Callable[..., Awaitable[Any]], locked: Callable[[], Awaitable[bool]]) -> None:
        self._keys, self._ask, self._locked = keys, ask, locked
        self._uses: dict[str, dict[int, Callable[[str], object]]] = {}
        self._numbers = itertools.count()

    def use(self, key: str | None, ended: Callable[[str], object]) -> Callable[[], None]:
        """Be told when a key ends.

        Args:
            key: its id; None: of no key, so that nothing is ever told.
            ended: called once, in the event loop, with the reason.

        Returns:
            What to call when the key is not used any more; calling it again changes nothing.
        """
        if key is None:
            return lambda: None
        number = next(self._numbers)
        self._uses.setdefault(key, {})[number] = ended

        def over() -> None:
            uses = self._uses.get(key, {})
            if uses.pop(number, None) is not None and not uses:
                del self._uses[key]

        return over

    async def run(self) -> None:
        """Go on looking for ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
            except RelaxError as error:
                logger.warning("whether keys still work cannot be seen, which is tried again: %s", error)
            except Exception:
                logger.exception("looking for keys that have ended failed")

    async def look(self) -> None:
        """Look once, and tell.

        Raises:
            JournalError: the database cannot be asked.
        """
        ids = [id for id in self._uses if id != LOCAL.id]
        ended: dict[str, str] = await self._ask(self._keys.ended, ids) if ids else {}
        if LOCAL.id in self._uses and await self._locked():
            ended[LOCAL.id] = LOCKED
        for id, why in ended.items():
            await self._tell(id, why)

    async def _tell(self, id: str, why: str) -> None:
        for told in itertools.count(1):
            uses = self._uses.get(id)
            if not uses:
                return
            _, ended = uses.popitem()
            if not uses:
                del self._uses[id]
            try:
                ended(why)
            except Exception:
                logger.exception("what goes on under %s could not be ended", id)
            if told % AT_ONCE == 0:
                await asyncio.sleep(0)


async def hang_up(socket: WebSocket, why: str) -> None:
    """Close the connection of a caller whose key works no more."""
    with contextlib.suppress(RuntimeError):  # it was closed at the same moment
        await socket.close(UNAUTHORISED, why[:REASON_LENGTH])

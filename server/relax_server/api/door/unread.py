"""Answers that clients do not read: how long a connection may hold them, and how many bytes all connections may."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

LEAST = 64 << 10
"""Bytes that a client must have taken at each look; half of what there was, if that is less."""
logger = logging.getLogger(__name__)


@dataclass
class _Held:
    size: int
    timer: asyncio.TimerHandle


class Unread:
    """Connections whose clients have not taken what they were sent. Belongs to one event loop.

    A connection is here from the moment in which its transport has so much to send that it asks for no more (64 KiB), until
    little is left. Whoever answers over it waits meanwhile.

    Args:
        seconds: in which a client must have taken something.
        most: bytes that may wait for all clients; then those for whom most wait are cut off.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        self.held: dict[asyncio.Transport, _Held] = {}
        self.size = 0
        """Bytes of all connections when they were last looked at."""
        self.cut = 0
        """Connections that were cut off."""

    def paused(self, transport: asyncio.Transport) -> None:
        """A transport asks for no more."""
        self.resumed(transport)
        size = transport.get_write_buffer_size()
        self.held[transport] = _Held(size, self._timer(transport))
        self.size += size
        while self.size > self._most:
            self._cut(max(self.held, key=lambda each: self.held[each].size))

    def resumed(self, transport: asyncio.Transport) -> None:
        """A transport has sent nearly all, or is closed; again changes nothing."""
        held = self.held.pop(transport, None)
        if held is not None:
            held.timer.cancel()
            self.size -= held.size

    def _timer(self, transport: asyncio.Transport) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._seconds, self._look, transport)

    def _look(self, transport: asyncio.Transport) -> None:
        held, left = self.held[transport], transport.get_write_buffer_size()
        if held.size - left < min(LEAST, held.size // 2):
            self._cut(transport)
            return
        self.size -= held.size - left
        held.size, held.timer = left, self._timer(transport)

    def _cut(self, transport: asyncio.Transport) -> None:
        self.resumed(transport)
        self.cut += 1
        logger.debug("a client that does not read was cut off: %s", transport.get_extra_info("peername"))
        transport.abort()

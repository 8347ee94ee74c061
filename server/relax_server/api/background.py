"""Work that no request waits for, such as the turns of rollouts, leaves the event loop to requests."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque

ROUNDS = 8
"""Rounds of the event loop from one piece of such work to the next: in each of them, all requests that are ready go on."""
REQUESTS = 2
"""Requests from one piece of such work to the next, while the loop is late."""
LOOK, LATE = 0.001, 0.0005
"""Seconds after which the loop is asked for a sign of life, and how much later it may come from a loop that is not late."""
LONGEST = 0.05
"""Seconds that a piece waits at most, however busy the loop is."""
LULL = 0.01
"""Seconds that a request keeps such work back."""


class Background:
    """Lets pieces of work begin one after the other, each key in its turn. Belongs to one event loop.

    While the loop has nothing else to do, a round takes microseconds, and nothing is lost. While requests come and the loop is
    late, which means that they wait for it, a piece begins for some requests only, so that whoever has many rollouts leaves
    the larger part of the loop to those who wait for answers. It does begin, though.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._round = self._requests = 0
        """Rounds and requests since the last piece of work."""
        self._began = self._asked = -LONGEST
        """When the last piece began, and the last request went on."""

    def make_way(self) -> None:
        """A request goes on that somebody waits for."""
        self._requests += 1
        self._asked = time.monotonic()

    async def turn(self, key: str) -> None:
        """Wait until a piece of work of a key may begin."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            self._round = 0
            loop.call_soon(self._next)
        self._waiting.setdefault(key, deque()).append(turn)
        await turn

    def _next(self) -> None:
        """One round of the loop is over."""
        self._round += 1
        if self._round < ROUNDS:
            asyncio.get_running_loop().call_soon(self._next)
        elif self._may_wait():
            self._look()
        else:
            self._serve()

    def _may_wait(self) -> bool:
        """Whether requests are more urgent, should they wait."""
        now = time.monotonic()
        return now - self._asked < LULL and self._requests < REQUESTS and now - self._began < LONGEST

    def _look(self) -> None:
        """Ask the loop for a sign of life."""
        asyncio.get_running_loop().call_later(LOOK, self._seen, time.monotonic() + LOOK)

    def _seen(self, due: float) -> None:
        """A sign of life has come, due at a moment of the monotonic clock."""
        if time.monotonic() - due > LATE and self._may_wait():
            self._look()
        else:
            self._serve()

    def _serve(self) -> None:
        """Let the next one begin that still waits."""
        self._round = self._requests = 0
        self._began = time.monotonic()
        while self._waiting:
            key, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[key] = queue  # behind the others
            if not turn.done():
                turn.set_result(None)
                break
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)

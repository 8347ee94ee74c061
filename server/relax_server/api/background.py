"""Work that no request waits for, such as the turns of rollouts, leaves the event loop to requests."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

ROUNDS = 8
"""Rounds of the event loop from one piece of such work to the next: in each of them, all requests that are ready go on."""


class Background:
    """Lets pieces of work begin one after the other, each key in its turn. Belongs to one event loop.

    While the loop has nothing else to do, a round takes microseconds, and nothing is lost. The busier it is, the longer its
    rounds are, and the more seldom a piece of work begins; but it does begin.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._round = 0
        """Rounds since the last piece of work, while any waits."""

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
        if self._round >= ROUNDS:
            self._round = 0
            self._serve()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)

    def _serve(self) -> None:
        """Let the next one begin that still waits."""
        while self._waiting:
            key, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[key] = queue  # behind the others
            if not turn.done():
                turn.set_result(None)
                return

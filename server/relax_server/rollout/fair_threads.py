"""Threads for work that grows with a request: each key in its turn, so that nobody's large requests hold up the others'."""

from __future__ import annotations

import asyncio
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any, TypeVar

from relax_sdk.errors import ServiceUnavailable
from relax_server.rollout.threads import CallThreads

SMALL = 8 << 10
"""Bytes of a request, or characters of a conversation, that are worked on in the event loop: a few milliseconds at most, and a
thread would take longer to wake."""
MESSAGE = 64
"""Characters of text that take as long to read and to render as a message without text."""
MOST_THREADS = 8
LIMIT = 60.0
"""Seconds that one piece of work may take."""
MOST_WAITING = 256
"""Pieces of work of one key that may wait; and all keys may have eight times as many."""
MOST_BYTES = 192 << 20
"""Bytes that the work of one key may hold while it waits and is done: three of the largest requests."""
BUSY, RETRY_SECONDS = 429, 1.0

T = TypeVar("T")


class FairThreads:
    """Few threads that the keys of a service share. Belongs to one event loop.

    A free thread goes to the key that was served longest ago, and within a key to what came first; no key has more than half
    of the threads, so that one whose work takes long leaves some to the others.

    Args:
        name: of the threads.
        total: threads; default: one for each core, from 2 to 8.
    """

    def __init__(self, name: str, total: int | None = None) -> None:
        self.total = total or min(max(2, os.cpu_count() or 1), MOST_THREADS)
        self.each = max(1, self.total // 2)
        """Threads that one key may have at once."""
        self.refused = 0
        """Pieces of work that found too much of their key's waiting."""
        self._threads = CallThreads(name, self.total)
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._pieces: Counter[str] = Counter()
        """Pieces of work by key, waiting or under way."""
        self._bytes: Counter[str] = Counter()

    def of(self, key: str) -> KeyThreads:
        """The threads as one key sees them."""
        return KeyThreads(self, key)

    @property
    def waiting(self) -> int:
        """Pieces of work that wait for a thread."""
        return self._pieces.total() - self._running.total()

    async def call(self, key: str, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a thread, once it is the key's turn.

        Args:
            key: whose work it is.
            size: bytes that it holds; 0 for work that must be done whatever waits, such as an answer that was generated.
            function: to call.
            arguments: given to it.

        Raises:
            ServiceUnavailable: too much of the key's work waits already; nothing was called.
            EpisodeTimeout: it took longer than `LIMIT`.
            Exception: what the function raises.
        """
        if size:
            self._admit(key, size)
        self._pieces[key] += 1
        self._bytes[key] += size
        try:
            await self._turn(key)
            done = self._threads.submit(function, *arguments, limit=LIMIT).future
            done.add_done_callback(lambda _: self._leave(key))
            return await asyncio.shield(done)  # whoever waits may go away; the thread is free only when it has finished
        finally:
            _less(self._pieces, key, 1)
            _less(self._bytes, key, size)

    def close(self) -> None:
        """Let the threads end."""
        self._threads.close()

    def _admit(self, key: str, size: int) -> None:
        held = self._bytes[key]
        if self._pieces[key] < MOST_WAITING and self.waiting < 8 * MOST_WAITING and (not held or held + size <= MOST_BYTES):
            return
        self.refused += 1
        raise ServiceUnavailable(
            f"{self._pieces[key]} large requests of this key, {held} bytes, are being read already; allowed: {MOST_WAITING}, "
            f"{MOST_BYTES} bytes; send it again later",
            *(BUSY, "busy", RETRY_SECONDS),
        )

    async def _turn(self, key: str) -> None:
        """Wait until the key has a thread."""
        if not self._waiting and self._running.total() < self.total and self._running[key] < self.each:
            self._running[key] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(key)
            raise

    def _leave(self, key: str) -> None:
        _less(self._running, key, 1)
        self._serve()

    def _serve(self) -> None:
        while self._running.total() < self.total:
            key = next((key for key in self._waiting if self._running[key] < self.each), None)
            if key is None:
                return
            queue = self._waiting[key]
            turn = queue.popleft()
            self._waiting.move_to_end(key)
            if not queue:
                del self._waiting[key]
            if not turn.done():
                self._running[key] += 1
                turn.set_result(None)


class KeyThreads:
    """`FairThreads` for the work of one key.

    Args:
        shared: with the other keys.
        key: its id.
    """

    def __init__(self, shared: FairThreads, key: str) -> None:
        self._shared, self._key = shared, key

    async def call(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """See `FairThreads.call`."""
        return await self._shared.call(self._key, size, function, *arguments)


def _less(counts: Counter[str], key: str, n: int) -> None:
    counts[key] -= n
    if counts[key] <= 0:
        del counts[key]

"""A request on the event loop, from its arrival until all its sequences have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from relax_server.engines.embedded.core import Sequence


@dataclass(eq=False)
class InFlight:
    """One request, from its arrival on."""

    rid: str
    aborted: bool = False
    news: asyncio.Queue[Sequence] | None = None
    """Streams: each new token's sequence."""
    left: int = 0
    done: asyncio.Future[None] | None = None
    began: float = field(default_factory=time.perf_counter)

    def notify(self, sequence: Sequence) -> None:
        if self.news is not None:
            self.news.put_nowait(sequence)
        if sequence.finish is not None:
            self.left -= 1
            if not self.left and self.done is not None and not self.done.done():
                self.done.set_result(None)

    async def updates(self) -> AsyncIterator[Sequence]:
        """Sequences with new tokens, until all have ended; news that is overtaken by later news is skipped."""
        assert self.news is not None
        more = True
        while more:
            batch = {id(s): s for s in [await self.news.get()]}
            while not self.news.empty():
                sequence = self.news.get_nowait()
                batch[id(sequence)] = sequence
            more = self.left > 0 or not self.news.empty()
            for sequence in batch.values():
                yield sequence

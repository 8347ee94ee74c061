"""What a run has trained, behind an engine, for as long as somebody asks."""

from __future__ import annotations

import asyncio
from pathlib import Path

from relax_server.api.trainings.child import RunProcess
from relax_server.api.trainings.protocol import Request, Start, Told

MODEL_IDLE = 300.0
"""Seconds without a request after which a trained model is put away."""
MODEL_SECONDS = 600.0
"""Seconds to start it, and to answer."""


class TrainedModel:
    """A run's weights behind an engine, for as long as somebody asks.

    Args:
        start: of its process.
        log: of its process.
    """

    def __init__(self, start: Start, log: Path) -> None:
        self._process = RunProcess(start, log)
        self._lock = asyncio.Lock()
        self._started = self.ended = False
        self._put_away: asyncio.TimerHandle | None = None

    async def ask(self, request: Request) -> Told:
        """One request after the other."""
        async with self._lock:
            if self._put_away is not None:
                self._put_away.cancel()
            try:
                if not self._started:
                    self._started = True
                    await self._process.start()
                    async with asyncio.timeout(MODEL_SECONDS):
                        async for told in self._process.told():
                            if told.kind == "ready":
                                break
                            if told.kind == "failed":
                                self.ended = True
                                return told
                answer = await self._process.ask(request, MODEL_SECONDS)
            except BaseException:
                self.ended = True
                await self._process.stop(5.0)
                raise
            self._put_away = asyncio.get_running_loop().call_later(MODEL_IDLE, self._later)
            return answer

    def _later(self) -> None:
        self.ended = True
        self._closing = asyncio.create_task(self._process.stop(5.0))

    async def close(self) -> None:
        """Put it away."""
        self.ended = True
        if self._put_away is not None:
            self._put_away.cancel()
        await self._process.stop(5.0)

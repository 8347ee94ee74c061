"""A run's process, as the service sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from relax_sdk.errors import RunError
from relax_server.api.trainings.protocol import Request, Start, Told
from relax_server.log_tail import log_tail

LINE_LIMIT = 16 << 20
"""Bytes of a line."""
STOP_SECONDS = 60.0
"""Seconds for the step in progress and a checkpoint."""


class RunProcess:
    """One `trainings.process`.

    Args:
        start: what it is to do.
        log: where its output goes (appended).
    """

    def __init__(self, start: Start, log: Path) -> None:
        self.start_with, self.log = start, log
        self._process: asyncio.subprocess.Process | None = None
        self._interrupted = False

    async def start(self) -> None:
        """Start it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "relax_server.api.trainings.process"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=LINE_LIMIT,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )
        await self._write(self.start_with)

    async def told(self) -> AsyncIterator[Told]:
        """What it says, until it ends."""
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            with contextlib.suppress(msgspec.DecodeError):  # a line cut short by its end
                yield msgspec.json.decode(line, type=Told)

    async def ask(self, request: Request, seconds: float) -> Told:
        """Ask a trained model.

        Raises:
            RunError: it has ended, or did not answer in time.
        """
        await self._write(request)
        try:
            async with asyncio.timeout(seconds):
                async for message in self.told():
                    if message.kind in ("answer", "failed"):
                        return message
        except TimeoutError:
            raise RunError(f"no answer within {seconds:.0f} s") from None
        raise RunError(f"the process has ended: {await self.log_tail()}")

    async def _write(self, message: Start | Request) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(message) + b"\n")
        with contextlib.suppress(ConnectionError):  # seen by who reads its answers
            await self._process.stdin.drain()

    def interrupt(self) -> None:
        """Let it end after a checkpoint; asked once, as a second interrupt would end it without one."""
        if self._process is not None and self._process.returncode is None and not self._interrupted:
            self._interrupted = True
            self._process.send_signal(signal.SIGINT)

    async def wait(self) -> int:
        """Its exit code."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Interrupt it, and kill it when it has not ended in time."""
        if self._process is None:
            return
        self.interrupt()
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def log_tail(self) -> str:
        """The end of its log, in one line."""
        return " | ".join((await log_tail(self.log, 5)).splitlines())

"""A role as a child process: started, watched, stopped; it never outlives its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from relax_server.guard import TOKEN
from relax_server.log_tail import log_tail
from relax_server.roles.channel import Channel
from relax_server.roles.messages import Died, Stop

STOP_SECONDS = 10.0
"""Seconds between being asked to stop and SIGKILL."""

ENDED_SECONDS = 1.0
"""Seconds for a process whose channel has closed to be gone."""
ENDED_POLL = 0.02
"""Seconds between looks at a process that is ending."""


def rank_name(role: str, rank: int) -> str:
    """Name of one of a role's processes: that of the role for rank 0, which leads, and `policy-1` and so on."""
    return role if rank == 0 else f"{role}-{rank}"


class RoleProcess:
    """One child process running `relax_server.roles.child`, and the channel to it."""

    def __init__(
        self,
        role: str,
        folder: Path,
        on_message: Callable[[Any], None],
        threads: int = 1,
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.role = role
        self.generation = 0
        self.log = folder / "logs" / f"{role}.log"
        self._on_message = on_message
        self._threads, self._env = threads, env
        self.host = platform.node()
        self.since: float | None = None
        """Unix seconds of its last start."""
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self, first: Any) -> None:
        """Start the process and send it its first message.

        Messages, and `Died` when it ends by itself, are handed to `on_message` in the running event loop.
        """
        loop = asyncio.get_running_loop()
        self.generation += 1
        generation, self._stopping = self.generation, False
        self._channel = channel = self._spawn()
        self.since = time.time()

        def deliver(message: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._deliver, generation, message)

        def closed() -> None:
            """Called in the listening thread: the channel closes a moment before the process can be asked how it ended."""
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(ENDED_SECONDS)
            deliver(None)

        channel.listen(deliver, closed)
        await asyncio.to_thread(self._send, first)

    def _spawn(self) -> Channel:
        """Start the process; a session of its own keeps a terminal's Ctrl-C away from it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        channel, fd = Channel.pair()
        env = {**os.environ, **thread_limits(self._threads), **self._env}
        env.pop(TOKEN, None)  # what environments and agents do there need not know how to command an engine elsewhere
        with self.log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "relax_server.roles.child", self.role, str(fd)],
                    pass_fds=[fd],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env,
                    start_new_session=True,
                )
            finally:
                os.close(fd)
        return channel

    def _deliver(self, generation: int, message: Any) -> None:
        if generation != self.generation:
            return
        if message is not None:
            self._on_message(message)
        elif not self._stopping:
            self._on_message(Died(self.role, generation, self._process.poll() if self._process else None, self.log))

    def send(self, message: Any) -> None:
        """Send; a process that is gone is reported by `Died`, not here."""
        self._send(message)

    def _send(self, message: Any) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send(message)

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ask it to stop, and kill it when it has not ended in time."""
        self._stopping = True
        if self._process is None:
            return
        if self.alive() and seconds > 0:
            self._send(Stop())
            await self._ended(seconds)
        self.kill()
        await self._ended(5.0)
        if self._channel is not None:
            self._channel.close()

    async def _ended(self, seconds: float) -> None:
        """Wait until it has ended, or for so long; without a thread, as none can be had while the interpreter shuts down."""
        until = time.monotonic() + seconds
        while self.alive() and time.monotonic() < until:  # noqa: ASYNC110 - nothing tells when a process ends
            await asyncio.sleep(ENDED_POLL)

    def kill(self) -> None:
        """SIGKILL, for a process that hangs."""
        if self._process is not None and self.alive():
            self._process.kill()

    async def log_tail(self) -> str:
        """The end of the process's log."""
        return await log_tail(self.log)


def thread_limits(threads: int) -> dict[str, str]:
    """Environment variables that keep numeric libraries to `threads` threads."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {name: str(threads) for name in names} | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

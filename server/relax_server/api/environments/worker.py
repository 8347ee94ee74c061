"""`WorkerLink`: the way to an environment that runs in a worker process, which is started when it is needed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from relax_sdk.errors import EnvError, RelaxError
from relax_sdk.hosting.protocol import Ask, Broken, Description, FromService, Hello, Reply, encode, read_from_host
from relax_sdk.media import MediaStore
from relax_server.api.environments.frames import FROM_WORKER, TO_WORKER, frame, read_frame
from relax_server.api.environments.limits import WorkerLimits, WorkerPlan
from relax_server.api.environments.sandbox import Sandbox, environment
from relax_server.api.environments.source import EnvSource
from relax_server.api.environments.told import read_line
from relax_server.api.quotas import KeyMeter
from relax_server.gateway.errors import ApiError
from relax_server.log_tail import log_tail
from relax_server.rollout.hosted import HostLink, InThread, TakeMedia

START_SECONDS = 120.0
"""Seconds to import the environment and to describe it."""
NOTICE_SECONDS = 3.0
"""Seconds for the guard to notice by itself that the worker has ended."""
END_SECONDS = 10.0
"""Seconds for the guard to kill what is left."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
"""Seconds until a worker that has ended is started again; doubled each time, until one has lived for a minute."""
LIVED = 60.0


class WorkerLink(HostLink):
    """Starts the worker with the first request, and again after it has ended.

    Args:
        source: of the code.
        limits: of the worker.
        log: where it writes.
        store: media go here.
        in_thread: calls what waits for the disk.
        sandbox: it runs in there.
        take: checks and stores an item that the worker sends.
        meter: finds who is charged for the seconds of a processor that it spends; None: nobody is.
    """

    def __init__(
        self,
        source: EnvSource,
        limits: WorkerLimits,
        log: Path,
        store: MediaStore,
        in_thread: InThread,
        sandbox: Sandbox,
        take: TakeMedia | None = None,
        meter: Callable[[], Awaitable[KeyMeter]] | None = None,
    ) -> None:
        super().__init__(source.id, store, in_thread, take)
        self.source, self.limits, self.log, self.sandbox = source, limits, log, sandbox
        self.ended = 0
        """Workers that have ended by themselves or were killed."""
        self.how = ""
        """The last one did."""
        self._meter = meter
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._watch: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._not_before, self._pause = 0.0, FIRST_PAUSE
        self._closed = False
        self._given_up: set[int] = set()
        self._asked: set[int] = set()
        """Requests that the worker of now was sent and somebody waits for."""

    async def require_time(self, patient: bool = False) -> None:
        """Raise if whoever is charged for the worker has used up their seconds of a processor.

        Args:
            patient: wait until there are some.

        Raises:
            ApiError: 429, with the seconds to wait.
        """
        if self._meter is not None:
            meter = await self._meter()
            await meter.wait() if patient else meter.check()

    async def describe(self) -> Description:
        """Start a worker and ask what the environment is.

        Raises:
            EnvError: it cannot be loaded, or not in time.
            SandboxUnavailable: code from outside is not run here.
        """
        async with self._starting:
            return await self._start()

    async def send(self, message: FromService) -> None:
        if not isinstance(message, Ask) and self._writer is None:
            return  # its episodes are gone with it
        if isinstance(message, Ask):
            await self.require_time()
        if self._writer is None:
            async with self._starting:
                if self._writer is None:
                    await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
                    await self._start()
        writer = self._writer
        if writer is None:
            raise EnvError(await self._gone())
        if isinstance(message, Ask):
            self._asked.add(message.id)
        writer.write(frame(encode(message), TO_WORKER))
        with contextlib.suppress(ConnectionError):  # its end is told by the one who watches
            await writer.drain()

    async def ask(self, make: Callable[[int], Ask]) -> Any:
        number = 0

        def numbered(id: int) -> Ask:
            nonlocal number
            number = id
            return make(id)

        try:
            return await super().ask(numbered)
        except asyncio.CancelledError:
            if number:
                self._gave_up(number)
            raise
        finally:
            self._asked.discard(number)

    def arrived(self, reply: Reply) -> None:
        self._given_up.discard(reply.id)
        super().arrived(reply)

    async def close(self) -> None:
        """End the worker."""
        self._closed = True
        await self._end()

    # ------------------------------------------------------------------------------------------------------- process

    def _gave_up(self, id: int) -> None:
        """A call has passed its time limit, and may hang for ever."""
        self._given_up.add(id)
        if len(self._given_up) >= self.limits.stuck and self._process is not None:
            self.how = f"{len(self._given_up)} calls hung in it"
            self._stop()

    async def _start(self) -> Description:
        if self._closed:
            raise EnvError(f"environment {self.env} was removed")
        await self.sandbox.require()
        ours, theirs = socket.socketpair()
        try:
            process = await self._spawn(theirs)
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        started, self.how, self._given_up, self._asked = time.monotonic(), "", set(), set()
        self._process, hearing = process, asyncio.create_task(self._hear(process))
        try:
            async with asyncio.timeout(START_SECONDS):
                writer.write(frame(msgspec.msgpack.encode(self.source), TO_WORKER))
                first = await read_frame(reader, FROM_WORKER)
                message = read_from_host(first) if first is not None else None
        except TimeoutError:
            message, self.how = None, f"was not ready within {START_SECONDS:.0f} s"
        except (ConnectionError, RelaxError) as error:
            message, self.how = None, str(error)
        if not isinstance(message, Hello):
            await self._finish(process, hearing, writer, started)
            raise EnvError(message.message if isinstance(message, Broken) else await self._gone())
        self._writer = writer
        self._watch = asyncio.create_task(self._listen(process, hearing, reader, writer, started))
        return message.env

    async def _spawn(self, connection: socket.socket) -> asyncio.subprocess.Process:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        plan = WorkerPlan(self.limits, str(self.sandbox.folder), self.sandbox.trusted)
        with self.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "relax_server.api.environments.guard", str(connection.fileno()), plan.to_json()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment(tempfile.gettempdir()),
                pass_fds=[connection.fileno()],
                start_new_session=True,
            )

    async def _listen(
        self,
        process: asyncio.subprocess.Process,
        hearing: asyncio.Task[str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        started: float,
    ) -> None:
        """Deliver what the worker answers, until it ends."""
        try:
            while (data := await read_frame(reader, FROM_WORKER)) is not None:
                message = read_from_host(data)
                if isinstance(message, Reply):
                    self.arrived(message)
        except RelaxError as error:
            self.how = str(error)
        finally:
            # The next request starts another worker, while this one's end is told.
            self._writer, asked = None, self._asked | self._given_up
            await self._finish(process, hearing, writer, started)
            self.lost(await self._gone(), asked)

    async def _hear(self, process: asyncio.subprocess.Process) -> str:
        """Charge what the guard says was spent, until it says how the worker ended."""
        assert process.stdout is not None
        meter = await self._meter() if self._meter is not None else None
        async for line in process.stdout:
            told = read_line(line.decode(errors="replace").strip())
            if isinstance(told, str):
                await process.wait()
                return told or "ended"
            if meter is not None:
                meter.take(told)
                self._end_if_used_up(meter)
        return "ended"

    def _end_if_used_up(self, meter: KeyMeter) -> None:
        try:
            meter.check()
        except ApiError as error:
            self.how = self.how or f"was ended: {error}"
            self._stop()

    async def _finish(
        self,
        process: asyncio.subprocess.Process,
        hearing: asyncio.Task[str],
        writer: asyncio.StreamWriter,
        started: float,
    ) -> None:
        """Let the guard kill what is left of it, and hear from it how it ended."""
        writer.close()
        told = ""
        try:
            if self.how:
                _close_input(process)
            told = await _last_words(process, hearing, NOTICE_SECONDS) or await _last_words(process, hearing, END_SECONDS)
        finally:
            hearing.cancel()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            self._process = None
        self.how = self.how or told or "ended"
        self.ended += 1
        if time.monotonic() - started > LIVED:
            self._pause = FIRST_PAUSE
        self._not_before = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _stop(self) -> None:
        if self._process is not None:
            _close_input(self._process)

    async def _end(self) -> None:
        self._stop()
        if self._watch is not None:
            await asyncio.wait({self._watch}, timeout=2 * END_SECONDS)

    async def _gone(self) -> str:
        lines = (await log_tail(self.log, 3)).splitlines()
        tail = f"; its log ends: {' | '.join(lines)}" if lines else ""
        return f"the worker process of environment {self.env} {self.how}{tail}"


async def _last_words(process: asyncio.subprocess.Process, hearing: asyncio.Task[str], seconds: float) -> str:
    """What the guard says when it ends; after so many seconds it is told to."""
    done, _ = await asyncio.wait({hearing}, timeout=seconds)
    if done and not hearing.cancelled():
        error = hearing.exception()
        return hearing.result() if error is None else f"ended, and how is not known ({error})"
    _close_input(process)
    return ""


def _close_input(process: asyncio.subprocess.Process) -> None:
    """The guard sees that and ends."""
    if process.stdin is not None:
        process.stdin.close()

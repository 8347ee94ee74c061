"""The process behind `relax serve --workers N`: it holds the port, starts the engine and the workers, and sees to their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict

import orjson

from relax_sdk.errors import RelaxError
from relax_server.api.core import folder_of
from relax_server.api.ending import LAST_SECONDS, SIGNALS
from relax_server.api.engine_roster import ENGINES, EngineAccess, named_engines
from relax_server.api.listening import address, listen
from relax_server.api.logs import say
from relax_server.api.own_engine import OwnEngine
from relax_server.api.settings import ServiceConfig
from relax_server.api.workers.board import Board
from relax_server.api.workers.channel import PING, SUPERVISOR, Channel, Message, inboxes
from relax_server.api.workers.place import HOME
from relax_server.api.workers.setup import WorkerSetup
from relax_server.gateway.errors import ApiError

START_SECONDS = 120.0
"""Seconds until a worker answers requests."""
RESTARTS = 5
"""Starts of a worker in a row that came to nothing, before the service ends."""
PAUSE, LONGEST_PAUSE = 0.5, 5.0
"""Seconds before a worker that has ended is started again: at first, and when it ends again and again."""
STEADY_SECONDS = 60.0
"""Seconds after which a worker that ends is taken to have been well."""

LOOK_SECONDS, HUNG_SECONDS = 10.0, 30.0
"""Seconds between two looks whether a worker answers; and for its answer, twice, as the whole machine may have stood still."""


class Worker:
    """A worker, whichever process it is just now.

    Args:
        index: its number.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.process: asyncio.subprocess.Process | None = None
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Who may play there; or why it does not start."""

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()


class Supervisor:
    """Runs a service of several workers.

    Args:
        config: of the service.
        modules: that each worker imports first.
    """

    def __init__(self, config: ServiceConfig, modules: Sequence[str] = ()) -> None:
        self._config, self._modules = config, tuple(modules)
        self._engines: tuple[EngineAccess, ...] = ()
        self._own: OwnEngine | None = None
        self._told: int | None = None
        """The signal that told the service to end."""
        self._hurried = False
        """The service did not end in time, or was told to end at once."""
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Run the service until it is told to end.

        Raises:
            ConfigError: the port is taken, or the folder cannot be used.
            EngineUnavailable: the engine does not start.
            RelaxError: a worker does not start.
        """
        folder, self._listener = folder_of(self._config), listen(self._config)
        self._over = asyncio.Event()
        self._workers = [Worker(index) for index in range(self._config.workers)]
        self._ends = inboxes([SUPERVISOR, *range(self._config.workers)])
        self._board_file = Board.make()
        self._board = Board(self._board_file)
        outboxes = {number: written for number, (_, written) in self._ends.items()}
        self._channel = Channel(SUPERVISOR, self._ends[SUPERVISOR][0], outboxes)
        self._channel.on("ready", self._ready)
        self._channel.on("failed", self._failed)
        self._channel.on(ENGINES, self._use)
        self._channel.listen()
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._tell_to_end, number)
        try:
            if await self._start():
                await self._over.wait()
                await self._end()
        finally:
            for worker in self._workers:
                worker.kill()
            for task in self._tasks:
                task.cancel()
            if self._own is not None:
                await self._own.stop()
        if self._hurried and self._told is not None:
            sys.exit(128 + self._told)
        say(f"ended; everything is in {folder}")

    async def _start(self) -> bool:
        """Start everything; False: it was told to end meanwhile.

        Raises:
            RelaxError: something does not start.
        """
        starting = asyncio.create_task(self._start_all())
        over = asyncio.create_task(self._over.wait())
        await asyncio.wait({starting, over}, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if self._told is not None:  # workers that it ended for that are no failure
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return False
        starting.result()
        return True

    async def _start_all(self) -> None:
        config = self._config
        self._engines = named_engines(config)
        if not self._engines:
            say("starting an engine")
            self._own = OwnEngine(config)
            self._engines = (await self._own.start(),)
            self._tasks.append(asyncio.create_task(self._own.watch(self._moved, lambda: self._tell_to_end(signal.SIGTERM))))
        say(f"starting {config.workers} workers")
        home = self._workers[HOME]
        others = [self._begin(worker, home) for worker in self._workers if worker is not home]
        who, *_ = await asyncio.gather(self._begin(home), *others)
        self._tasks += [asyncio.create_task(keep(worker)) for worker in self._workers for keep in (self._keep, self._look)]
        say(f"ready at {address(self._listener)} · {config.model} · {config.folder} · {config.workers} workers · {who}")

    # ------------------------------------------------------------------------------------------------------- workers

    async def _begin(self, worker: Worker, first: Worker | None = None) -> str:
        """Start a worker and wait until it answers requests; returns who may play there.

        Args:
            worker: to start.
            first: a worker that is started too, and has to be ready before this one does anything, as it makes the journal.

        Raises:
            RelaxError: it does not start.
        """
        if worker.ready.done():
            worker.ready = asyncio.get_running_loop().create_future()
        setup = WorkerSetup(
            config=self._config,
            modules=self._modules,
            index=worker.index,
            parent=os.getpid(),
            engines=self._engines,
            listener=self._listener.fileno(),
            board=self._board_file,
            inbox=self._ends[worker.index][0].fileno(),
            outboxes={number: written.fileno() for number, (_, written) in self._ends.items()},
        )
        worker.process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "relax_server.api.workers.process"),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=setup.files,
            start_new_session=True,  # what a terminal sends comes here alone
        )
        ended = asyncio.create_task(process.wait())
        try:
            assert process.stdin is not None
            if first is not None:  # meanwhile this one has imported what it needs
                await asyncio.wait({ended, first.ready}, return_when=asyncio.FIRST_COMPLETED)
            process.stdin.write(pickle.dumps(setup))
            process.stdin.close()
            await asyncio.wait({ended, worker.ready}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if worker.ready.done():
                return worker.ready.result()
        finally:
            ended.cancel()
        how = f"ended with exit code {process.returncode}" if process.returncode is not None else "was not ready in time"
        worker.kill()
        raise RelaxError(f"worker {worker.index} {how} while it started; what it has written is above")

    async def _keep(self, worker: Worker) -> None:
        """Start a worker again whenever it ends."""
        pause, in_vain, clock = PAUSE, 0, asyncio.get_running_loop().time
        while True:
            began = clock()
            assert worker.process is not None
            code = await worker.process.wait()
            self._board.set_up(worker.index, False)
            self._channel.ended(worker.index)
            self._tell_others(worker, "ended", {"worker": worker.index})
            if self._told is not None:
                return
            pause = PAUSE if clock() - began > STEADY_SECONDS else min(2 * pause, LONGEST_PAUSE)
            say(f"worker {worker.index} ended (exit code {code}); starting it again")
            while True:
                await asyncio.sleep(pause)
                if self._told is not None:
                    return
                try:
                    await self._begin(worker)
                    in_vain = 0
                    break
                except RelaxError as error:
                    in_vain += 1
                    say(f"worker {worker.index} does not start: {error}")
                    if in_vain >= RESTARTS:
                        say(f"worker {worker.index} did not start {in_vain} times; giving up")
                        self._tell_to_end(signal.SIGTERM)
                        return
                    pause = min(2 * pause, LONGEST_PAUSE)

    async def _look(self, worker: Worker) -> None:
        """End a worker that hangs."""
        while self._told is None:
            await asyncio.sleep(LOOK_SECONDS)
            process = worker.process
            if not self._board.up(worker.index) or await self._answers(worker) or await self._answers(worker):
                continue
            if worker.process is process and self._board.up(worker.index) and self._told is None:
                say(f"worker {worker.index} has not answered for {2 * HUNG_SECONDS:g} s; ending it")
                worker.kill()

    async def _answers(self, worker: Worker) -> bool:
        """Whether a worker answers, or has ended, within `HUNG_SECONDS`; nothing is said sooner."""
        clock = asyncio.get_running_loop().time
        end = clock() + HUNG_SECONDS
        try:
            await self._channel.ask(worker.index, PING, {}, HUNG_SECONDS)
        except ApiError:
            if self._board.up(worker.index):
                await asyncio.sleep(max(0.0, end - clock()))
            return not self._board.up(worker.index)
        return True

    def _ready(self, message: Message) -> None:
        self._board.set_up(message.sender, True)
        ready = self._workers[message.sender].ready
        if not ready.done():
            ready.set_result(message.body["who"])

    def _failed(self, message: Message) -> None:
        ready = self._workers[message.sender].ready
        if not ready.done():
            ready.set_exception(RelaxError(message.body["why"]))

    def _tell_others(self, but: Worker | None, kind: str, body: dict[str, object]) -> None:
        for worker in self._workers:
            if worker is not but and self._board.up(worker.index):
                with contextlib.suppress(ApiError):  # it takes nothing any more, and is about to end
                    self._channel.send(worker.index, kind, orjson.dumps(body))

    # ------------------------------------------------------------------------------------------------------- engines

    def _use(self, message: Message) -> None:
        """Worker 0 has other engines now."""
        self._engines = tuple(EngineAccess(**row) for row in message.body["engines"])

    async def _moved(self, url: str, access: EngineAccess) -> None:
        """The engine of ours has another address."""
        self._engines = (*(known for known in self._engines if known.url != url), access)
        self._tell_others(None, ENGINES, {"engines": [asdict(known) for known in self._engines], "drain": 0.0})

    # -------------------------------------------------------------------------------------------------------- ending

    def _tell_to_end(self, number: int) -> None:
        """A signal came: the first one drains all workers, a second one ends them at once."""
        if self._told is not None:
            say("ending at once; what was under way is lost, what is durable stays")
            self._hurried = True
        self._told = number
        self._over.set()
        for worker in self._workers:
            if self._hurried or not self._board.up(worker.index):
                worker.kill()
        self._tell_others(None, "signal", {"number": number})

    async def _end(self) -> None:
        """Wait until all workers have drained and ended, no longer than they may take."""
        seconds = self._config.drain_seconds + LAST_SECONDS
        running = [worker.process for worker in self._workers if worker.process is not None]
        try:
            async with asyncio.timeout(seconds):
                codes = await asyncio.gather(*(process.wait() for process in running))
            self._hurried = self._hurried or any(code > 128 for code in codes)
        except TimeoutError:
            say(f"not ended within {seconds:g} s; ending now, what is durable stays")
            self._hurried = True

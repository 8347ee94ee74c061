"""Processes of agents: started anew, or forked from one that has imported what the agent needs."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.util
import itertools
import json
import logging
import os
import re
import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from relax_sdk.errors import EpisodeError

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Seconds for the fork server to import and to answer."""
TERM_SECONDS = 3.0
"""Seconds between asking an agent to end and killing it."""
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_SERVER = Path(__file__).with_name("fork_server.py")
LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "openai": ("openai", "openai.resources.chat", "openai.resources.responses"),
    "pydantic_ai": ("pydantic_ai", "pydantic_ai.models.openai", "pydantic_ai.providers.openai"),
    "relax_sdk": ("relax_sdk", "relax_sdk.client"),
    "httpx": ("httpx",),
    "numpy": ("numpy",),
}
"""What is imported beforehand for a program that imports the name: libraries of which nothing depends on the environment
variables at that time, and which start no threads."""


class AgentProcess(Protocol):
    """One running agent, in a session of its own."""

    output: asyncio.StreamReader

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        ...

    async def wait(self) -> int:
        """Wait for its end."""
        ...


class StartedProcess:
    """A process of its own from the beginning."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        self._process, self.output = process, process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()


class ForkedProcess:
    """A child of the fork server."""

    def __init__(self, pid: int, output: asyncio.StreamReader, ended: asyncio.Future[int]) -> None:
        self.pid, self.output, self._ended = pid, output, ended

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)


class AgentProcesses:
    """Starts one command, again and again.

    A Python program, `python PROGRAM …` or `python -m MODULE …`, that imports one of `LIBRARIES` at its top is forked from a
    process that has done so already: an agent with the `openai` client is then spared a second of imports.

    Args:
        command: the words.
        fork: whether programs may be forked.
    """

    def __init__(self, command: Sequence[str], fork: bool = True) -> None:
        self.command = list(command)
        modules = modules_of(self.command) if fork else ()
        self._forks = ForkServer(self.command[0], modules, self.command[1:]) if modules else None
        self._forking = self._forks is not None

    async def start(self, variables: Mapping[str, str]) -> AgentProcess:
        """Start it with more environment variables.

        Raises:
            EpisodeError: it cannot be started.
        """
        if self._forks is not None and self._forking:
            try:
                return await self._forks.start(variables)
            except (OSError, TimeoutError) as error:
                logger.warning("agents are started anew from now on, not forked: %s", error or "no answer in time")
                self._forking = False  # those that run go on
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        except OSError as error:
            raise EpisodeError(f"the agent {self.command[0]!r} cannot be started: {error.strerror}") from error
        return StartedProcess(process)

    async def close(self) -> None:
        """End what was started to start others."""
        if self._forks is not None:
            await self._forks.close()


class ForkServer:
    """A process that has imported libraries and forks; started when it is needed.

    Args:
        python: the interpreter.
        modules: to import.
        program: that its children run: a path or `-m` and a module, and arguments.
    """

    def __init__(self, python: str, modules: Sequence[str], program: Sequence[str]) -> None:
        self._python, self._modules, self._program = python, ",".join(modules), list(program)
        self._one_by_one = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._listening: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[tuple[int, asyncio.Future[int]]]] = {}
        """What will be process id and exit status, by the number of the request."""
        self._running: dict[int, asyncio.Future[int]] = {}

    async def start(self, variables: Mapping[str, str]) -> ForkedProcess:
        """Fork.

        Raises:
            OSError: there is no such server, or it ended.
            TimeoutError: it does not answer.
        """
        async with self._one_by_one:
            if self._control is None:
                await self._begin()
            assert self._control is not None
            loop, number = asyncio.get_running_loop(), next(self._numbers)
            started = self._asked[number] = loop.create_future()
            ours, theirs = os.pipe()
            try:
                request = json.dumps({"number": number, "variables": dict(variables)})
                socket.send_fds(self._control, [request.encode()], [theirs])
                pid, ended = await asyncio.wait_for(started, START_SECONDS)
            except BaseException:
                os.close(ours)
                raise
            finally:
                os.close(theirs)
                self._asked.pop(number, None)
            output = asyncio.StreamReader()
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), os.fdopen(ours, "rb", 0))
            return ForkedProcess(pid, output, ended)

    async def close(self) -> None:
        """End it, and what is left of its children."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        process = self._process
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(self._python, str(_SERVER), str(theirs.fileno()), self._modules, *self._program),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self._control = ours
        self._listening = asyncio.create_task(self._listen(ours, self._process))

    async def _listen(self, control: socket.socket, process: asyncio.subprocess.Process) -> None:
        """Hear which children were started and have ended, until the server itself has."""
        loop, rest = asyncio.get_running_loop(), b""
        try:
            with contextlib.suppress(ConnectionError):
                while part := await loop.sock_recv(control, 1 << 16):
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        self._heard(json.loads(line))
        finally:
            control.close()
            self._control = None
            for started in self._asked.values():
                if not started.done():
                    started.set_exception(ConnectionError("the process that forks them has ended"))
            for pid, ended in self._running.items():  # nobody tells any more how they end
                _signal(pid, signal.SIGKILL, not ended.done())
                if not ended.done():
                    ended.set_result(-signal.SIGKILL)
            self._running.clear()

    def _heard(self, message: dict[str, int]) -> None:
        if "started" in message:
            pid = message["started"]
            ended = self._running[pid] = asyncio.get_running_loop().create_future()
            started = self._asked.get(message["number"])
            if started is not None and not started.done():
                started.set_result((pid, ended))
            else:  # whoever asked has gone
                _signal(pid, signal.SIGKILL, True)
        else:
            self._running.pop(message["ended"]).set_result(message["status"])


def _signal(pid: int, number: int, running: bool) -> None:
    """Send a signal to a process and all that it started; one that has just been forked has no group of its own yet."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        if running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def modules_of(command: Sequence[str]) -> tuple[str, ...]:
    """What can be imported beforehand for a command; empty if it is no Python program, or imports nothing that is known."""
    if len(command) < 2 or not _PYTHON.fullmatch(Path(command[0]).name) or shutil.which(command[0]) is None:
        return ()
    if command[1] == "-m" and len(command) > 2:
        source = _source(command[2])
    else:
        source = Path(command[1]) if not command[1].startswith("-") else None
    try:
        tree = ast.parse(source.read_bytes()) if source is not None else None
    except (OSError, SyntaxError, ValueError):
        tree = None
    if tree is None:
        return ()
    names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    roots = dict.fromkeys(name.partition(".")[0] for name in names)
    return tuple(module for root in roots for module in LIBRARIES.get(root, ()))


def _source(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.has_location else None


async def end(process: AgentProcess) -> None:
    """Ask a process and all that it started to end, and kill what is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        _signal(process.pid, number, process.returncode is None)
        if process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), TERM_SECONDS)


__all__ = ["LIBRARIES", "AgentProcess", "AgentProcesses", "end", "modules_of"]

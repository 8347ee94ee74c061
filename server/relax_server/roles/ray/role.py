"""Handles of actors: what whoever starts a role or an engine in a Ray cluster holds of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from relax_sdk.config import EngineKind
from relax_sdk.errors import EngineError, EngineUnavailable, RelaxError, RunError
from relax_server.engines.settings import EngineSettings
from relax_server.log_tail import log_tail
from relax_server.roles.channel import pack, unpack
from relax_server.roles.messages import Died, Ended, Started, Stop, Warn
from relax_server.roles.process import STOP_SECONDS
from relax_server.roles.ray.actors import EngineActor, RoleActor

NAME_SECONDS = 60.0
"""Seconds for a role of the same run that has just been killed to be gone, or its node to be given up by Ray."""
NAME_POLL = 0.1
AGAIN_SECONDS = 1.0
"""Seconds between two tries to have Ray start an actor."""

PLACE_SECONDS = 30.0
"""Seconds for Ray to start an actor before the user is told that it waits for room."""
TOLD_SECONDS = 2.0
"""Seconds for what an engine said of its start to come through once it has started."""

GONE_SECONDS = 20.0
"""Seconds for an actor that was killed to be gone; Ray waits 5 s before it ends a process that does not answer."""


class Places(Protocol):
    """Where the actors of a run go; see `RayPlacement`."""

    one_machine: bool
    """All nodes are on one, so that engines need not be reached from elsewhere."""

    @property
    def needed(self) -> tuple[Path, ...]:
        """Folders that every node must see."""
        ...

    def role_options(self, name: str, threads: int) -> dict[str, Any]:
        """Options of a role's actor."""
        ...

    def engine_options(self, added: bool) -> dict[str, Any]:
        """Options of an engine's actor; `added`: no room is kept for it."""
        ...


class RayRole:
    """One role in a Ray actor: the interface of `RoleProcess`."""

    def __init__(self, role: str, folder: Path, on_message: Callable[[Any], None], places: Places, threads: int = 1) -> None:
        self.role = role
        self.generation = 0
        self.log = folder / "logs" / f"{role}.log"
        self._on_message = on_message
        self._places = places
        self._threads = threads
        self._actor: Any = None
        self._task: asyncio.Task[None] | None = None
        self._pid: int | None = None
        self.host = ""
        """Name of its node; empty before it runs."""
        self.since: float | None = None
        """Unix seconds of its last start."""
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Process id on its node."""
        return self._pid

    async def start(self, first: Any) -> None:
        """Start the actor with its first message, in the place of an earlier one.

        Messages, and `Died` when it ends by itself, are handed to `on_message` in the running event loop.

        Raises:
            RunError: the earlier one, or that of another run in the same folder, is not gone in time.
        """
        self.kill()
        self.generation += 1
        self._stopping, self._pid = False, None
        self._actor = await self._create(self.generation)
        self._task = asyncio.create_task(self._live(self.generation, pack(first)))

    async def _create(self, generation: int) -> Any:
        """One actor of a name can live at a time, so that a role which is not known to be gone cannot work beside the next."""
        cls: Any = ray.remote(concurrency_groups={"control": 1})(RoleActor)  # pyright: ignore[reportCallIssue]
        until = time.monotonic() + NAME_SECONDS
        while self._current(generation):
            try:
                options = self._places.role_options(self.role, self._threads)
                return cls.options(**options).remote(self.role, not self._places.one_machine)
            except ValueError as error:  # the name is taken
                if time.monotonic() > until:
                    raise RunError(
                        f"a {self.role} of this run folder is still there; is the run going on elsewhere?"
                    ) from error
                await asyncio.sleep(NAME_POLL)
        raise RunError(f"the {self.role} is not to be started any more")

    def _current(self, generation: int) -> bool:
        return generation == self.generation and not self._stopping

    async def _live(self, generation: int, first: bytes) -> None:
        """Hear the actor from its beginning to its end."""
        returncode, cause = None, ""
        try:
            async for item in await self._begin(generation, first):
                message = unpack(await item)
                if isinstance(message, Ended):
                    returncode = message.returncode
                elif generation == self.generation:
                    self._on_message(message)
        except (RayError, RunError) as error:
            cause = reason(error)
        if self._current(generation):
            self._on_message(Died(self.role, generation, returncode, self.log, cause))

    async def _begin(self, generation: int, first: bytes) -> Any:
        """The stream of its messages once it runs; a node that Ray does not know to be dead yet may be tried in vain.

        Raises:
            RayError: it cannot be started.
            RunError: its name is not free.
        """
        until = time.monotonic() + NAME_SECONDS
        while True:
            stream = self._actor.serve.remote(first, self.log, self._places.needed)
            started = asyncio.ensure_future(anext(stream))
            if not (await asyncio.wait([started], timeout=PLACE_SECONDS))[0] and self._current(generation):
                self._on_message(Warn(f"the {self.role} waits for room in the Ray cluster", self.role))
            try:
                message = unpack(await (await started))
            except RayActorError as error:
                if its_own_fault(error) or time.monotonic() > until or not self._current(generation):
                    raise
            else:
                assert isinstance(message, Started)
                self._pid, self.host, self.since = message.pid, message.host, time.time()
                return stream
            self.kill()  # it may only be out of reach, or be put on another node, and holds the name
            await asyncio.sleep(AGAIN_SECONDS)
            self._actor = await self._create(generation)

    def send(self, message: Any) -> None:
        """Send; one that is gone is reported by `Died`, not here."""
        if self._actor is not None:
            self._actor.put.remote(pack(message))

    def alive(self) -> bool:
        return self._task is not None and not self._task.done()

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ask it to stop, and kill it when it has not ended in time."""
        self._stopping = True
        if self._task is None:
            return
        if self.alive() and seconds > 0:
            self.send(Stop())
            await asyncio.wait([self._task], timeout=seconds)
        self.kill()
        await asyncio.wait([self._task], timeout=GONE_SECONDS)

    def kill(self) -> None:
        """End the actor's process."""
        if self._actor is not None:
            ray.kill(self._actor)

    async def log_tail(self) -> str:
        """The end of its log."""
        return await log_tail(self.log)


class RayEngine:
    """One engine whose process an actor starts and watches: the interface of `ServerProcess`.

    Args:
        places: where actors go.
        kind, model_path, log_path, settings: of the process.
        added: it has no place that was kept for it.
        tell: told what it is doing while it starts; None: it does not say.
    """

    def __init__(
        self,
        places: Places,
        kind: EngineKind,
        model_path: Path,
        log_path: Path,
        settings: EngineSettings,
        added: bool = False,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.log_path = log_path
        self._tell = tell
        self._places, self._arguments, self._added = places, (kind, model_path, log_path, settings), added
        self._actor: Any = None
        self._url = ""
        self._ended: asyncio.Task[None] | None = None
        self.pid: int | None = None
        """Process id on its node."""
        self.host = ""
        """Name of its node; empty before it runs."""
        self.token = settings.token
        """What it wants to be shown with every call."""

    @property
    def url(self) -> str:
        """The address at which it answers.

        Raises:
            EngineError: it was not started.
        """
        if not self._url:
            raise EngineError("the engine was not started; await start() first")
        return self._url

    async def start(self, timeout: float = 120.0) -> None:
        """Start it and wait until it answers requests.

        Raises:
            ConfigError: its node does not see the run's folders.
            EngineUnavailable: it ended or was not ready in time, or there is no room for it.
        """
        until = time.monotonic() + NAME_SECONDS
        while True:
            actor = self._place()
            telling = asyncio.create_task(self._listen(actor))
            try:
                self._url, self.pid, self.host = await asyncio.wait_for(actor.start.remote(timeout), timeout)
                await asyncio.wait({telling}, timeout=TOLD_SECONDS)  # its last words may come after its answer
                break
            except (RayError, TimeoutError) as error:
                ray.kill(self._actor)
                if isinstance(error, RayTaskError) and isinstance(error.cause, RelaxError):
                    raise error.cause from None
                if not isinstance(error, RayActorError) or its_own_fault(error) or time.monotonic() > until:
                    why = reason(error) if isinstance(error, RayError) else f"not ready within {timeout:g} s; is there room?"
                    raise EngineUnavailable(f"the engine's actor: {why}\n{await self.log_tail()}") from error
            finally:
                telling.cancel()
            await asyncio.sleep(AGAIN_SECONDS)
        self._ended = asyncio.create_task(self._wait(self._actor.wait.remote()))

    def _place(self) -> Any:
        places = self._places
        cls = ray.remote(EngineActor).options(**places.engine_options(self._added))
        self._actor = cls.remote(*self._arguments, places.needed, not places.one_machine, self._tell is not None)
        return self._actor

    async def _listen(self, actor: Any) -> None:
        """Pass on what it says of its start."""
        if self._tell is None:
            return
        with contextlib.suppress(RayError):  # `start` says what is wrong
            async for told in actor.progress.remote():
                self._tell(await told)

    async def _wait(self, ended: Any) -> None:
        try:
            await ended
        except RayError:  # the actor is gone, and its engine with it
            return

    def alive(self) -> bool:
        """Whether the process exists; `HttpEngine.health` tells whether it answers."""
        return self._ended is not None and not self._ended.done()

    async def stop(self) -> None:
        """Ask it to end, and kill it if it has not in time."""
        if self._actor is None:
            return
        if self.alive():
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(self._actor.stop.remote(), STOP_SECONDS)
        ray.kill(self._actor)
        if self._ended is not None:
            await asyncio.wait([self._ended], timeout=GONE_SECONDS)

    async def log_tail(self) -> str:
        """The end of its log."""
        return f"end of {self.log_path}:\n{await log_tail(self.log_path)}"


def its_own_fault(error: RayActorError) -> bool:
    """Whether an actor could not begin wherever it is put; else Ray may have tried a node of whose end it did not know."""
    return "creation task" in str(error)


def reason(error: Exception) -> str:
    """Ray's account of an actor's end, without its advice."""
    if not isinstance(error, RayActorError):
        return f"{type(error).__name__}: {str(error).strip().rpartition(chr(10))[2]}"
    lines = [line.strip() for line in str(error).splitlines()]
    line = next((line for line in lines if line.startswith("The actor is dead because")), lines[-1] if lines else "")
    return line.partition(" Some common causes")[0].removeprefix("The actor is dead because ").rstrip(". ")

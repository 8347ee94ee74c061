"""`host()`: an environment of this process, a notebook's cell included, that a rollout service steps."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import threading
from types import TracebackType
from typing import Any, Self

from relax_sdk.client.transport import URL
from relax_sdk.env import Env
from relax_sdk.errors import RelaxError, ServiceError, ServiceUnavailable
from relax_sdk.hosting.host import EnvHost, describe
from relax_sdk.hosting.protocol import Hello, Refused, Welcome, encode, read_from_service
from relax_sdk.registry import EnvSpec, get_spec
from relax_sdk.retrying import retrying
from relax_sdk.tasks import Tasks

OPEN_SECONDS = 30.0
"""Seconds to connect, and to be welcomed."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds before connecting again: the first, and the longest."""
GIVE_UP_SECONDS = 600.0
"""Seconds without a connection, after which the hosting ends."""
LEAVE_SECONDS = 2.0
"""Seconds to take leave of the service."""
MAX_MESSAGE = 256 << 20
"""Bytes."""


class Hosting:
    """An environment that a service steps in this process, in a thread of its own, until `close`. A context manager."""

    def __init__(self, spec: EnvSpec, url: str, key: str | None) -> None:
        self.spec = spec
        self.url = url.rstrip("/")
        self.id = spec.id
        """Its name at the service."""
        self._key = key
        self._token: str | None = None
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._socket: Any = None
        self._thread = threading.Thread(target=self._run, name="relax-host", daemon=True)
        self._thread.start()
        try:
            self._ready.result(2 * OPEN_SECONDS)
        except TimeoutError:
            self.close()
            raise ServiceUnavailable(
                f"the rollout service at {self.url} did not answer within {2 * OPEN_SECONDS:.0f} s"
            ) from None

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has ended.

        Args:
            timeout: seconds; None: for ever.

        Raises:
            TimeoutError: it goes on.
            ServiceError: the service no longer wants it, or was away for too long.
        """
        self._done.result(timeout)

    def close(self) -> None:
        """End it; the service is told, and its episodes there fail."""
        loop = self._loop
        if loop is not None and not self._done.done():
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(lambda: setattr(self, "_leaving", loop.create_task(self._leave())))
        self._thread.join(10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------------- its thread

    async def _leave(self) -> None:
        """Say goodbye, so that nobody waits for this host to come back."""
        if self._socket is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._socket.close(), LEAVE_SECONDS)
        if self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.create_task(self._serve())
            try:
                await self._task
            except asyncio.CancelledError:
                return

        try:
            asyncio.run(main())
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            self._done.set_exception(error)
            return
        if not self._ready.done():
            self._ready.set_exception(ServiceError("the hosting was closed"))
        self._done.set_result(None)

    async def _serve(self) -> None:
        description = describe(self.spec)
        host = EnvHost(self.spec)

        async def connected() -> None:
            await self._connected(host, Hello(description, self._token))

        try:
            while True:
                patience = GIVE_UP_SECONDS if self._ready.done() else 0.0  # a service that is not there at first may never be
                await retrying(_Lost, FIRST_PAUSE, longest_pause=LONGEST_PAUSE, seconds=patience)(connected)
                await asyncio.sleep(FIRST_PAUSE)
        except _Lost as error:
            raise ServiceUnavailable(f"the rollout service at {self.url} cannot be reached ({error})") from error
        finally:
            await host.close()

    async def _connected(self, host: EnvHost, hello: Hello) -> None:
        """One connection, from its opening to its loss.

        Raises:
            _Lost: it could not be opened.
            ServiceError: the service refuses.
        """
        from websockets.asyncio.client import connect
        from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

        url = "ws" + self.url.removeprefix("http") + "/v1/env-host"
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        welcomed = False
        try:
            opened = connect(url, additional_headers=headers, max_size=MAX_MESSAGE, open_timeout=OPEN_SECONDS, compression=None)
            async with opened as socket:
                self._socket = socket

                async def send(frame: bytes) -> None:
                    try:
                        await socket.send(frame)
                    except ConnectionClosed as error:
                        raise ConnectionError("the service is away") from error

                await send(encode(hello))
                first = read_from_service(_bytes(await asyncio.wait_for(socket.recv(), OPEN_SECONDS)))
                if isinstance(first, Refused):
                    raise ServiceError(f"POST /v1/env-host: {first.message}", 409, "refused")
                if isinstance(first, Welcome):
                    if self._token not in (None, first.token):  # the service has begun anew, and knows none of its episodes
                        await host.close()
                    self._token = first.token
                host.connect(send)
                welcomed = True
                if not self._ready.done():
                    self._ready.set_result(None)
                async for frame in socket:
                    host.take(read_from_service(_bytes(frame)))
        except InvalidStatus as error:
            status = error.response.status_code
            if status in (502, 503, 504):
                raise _Lost(f"it answers {status}") from error
            raise ServiceError(
                f"{url}: the service answers {status}; has the key the right to run?", status, "refused"
            ) from error
        except (OSError, TimeoutError, WebSocketException, ConnectionError) as error:
            if not welcomed:
                raise _Lost(str(error) or type(error).__name__) from error


class _Lost(RelaxError):
    """There is no connection."""


def _bytes(frame: str | bytes) -> bytes:
    return frame.encode() if isinstance(frame, str) else frame


def host(
    env: str | type[Env] | EnvSpec,
    url: str = URL,
    key: str | None = None,
    *,
    id: str | None = None,
    tasks: Tasks = None,
) -> Hosting:
    """Let a rollout service step an environment that stays in this process; no code is sent.

    It can be played there by its name, in sessions and rollouts and by whoever may run, while the connection lasts. A broken
    connection is made again, and episodes under way go on.

    Args:
        env: a registered name, a class, or a spec.
        url: of the service.
        key: with the right to run, where the service wants one.
        id: its name there; default: its own.
        tasks: in place of those it was registered with.

    Returns:
        The hosting, which goes on in a thread: `with relax.host(MyEnv): …`, or `.wait()`.

    Raises:
        ServiceError: the service refuses: a key is wanted, or the name is taken.
        ServiceUnavailable: it cannot be reached.
        RegistryError, ConfigError: the environment cannot be loaded.
    """
    spec: Any = get_spec(env)
    changes = {name: value for name, value in (("id", id), ("tasks", tasks)) if value is not None}
    return Hosting(dataclasses.replace(spec, **changes), url, key)

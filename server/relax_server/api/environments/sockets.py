"""Hosts that are reached by WebSocket, and runs that play what this service plays."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import WebSocket
from starlette.websockets import WebSocketDisconnect, WebSocketState

from relax_sdk.errors import EnvError, RelaxError
from relax_sdk.hosting.host import told
from relax_sdk.hosting.protocol import (
    Ask,
    Close,
    Description,
    FromHost,
    FromService,
    Reply,
    encode,
    read_from_host,
    read_from_service,
)
from relax_sdk.media import MediaStore
from relax_server.rollout.hosted import HostLink, InThread, TakeMedia

GOODBYE = 1000
"""The code with which a WebSocket is closed on purpose."""
AWAY_SECONDS = 30.0
"""Seconds without a connection, after which a host is given up and its episodes fail."""


class SocketLink(HostLink):
    """The way to a host that has connected here. A connection that breaks may be made again.

    Args:
        description: of the environment.
        owner: id of the key that hosts it.
        store: media go here.
        in_thread: calls what waits for the disk.
        take: checks and stores an item that the host sends.
    """

    def __init__(
        self, description: Description, owner: str, store: MediaStore, in_thread: InThread, take: TakeMedia | None = None
    ) -> None:
        super().__init__(description.id, store, in_thread, take)
        self.description, self.owner = description, owner
        self.token = secrets.token_urlsafe(24)
        self.away_since: float | None = None
        """Monotonic seconds; None while there is a connection."""
        self.given_up = False
        self._socket: WebSocket | None = None
        self._lock = asyncio.Lock()

    @property
    def there(self) -> bool:
        """Whether the host is connected."""
        return self._socket is not None

    async def send(self, message: FromService) -> None:
        if self.given_up:
            raise EnvError(f"the host of environment {self.env} is gone")
        if self._socket is None:
            return  # requests are sent when it is back
        await self._send(self._socket, message)

    async def serve(self, socket: WebSocket) -> bool:
        """Take a connection, and deliver what comes over it until it ends.

        Returns:
            Whether the host has taken its leave, so that it is not expected back.

        Raises:
            EnvError: it speaks nonsense.
        """
        self._socket, self.away_since = socket, None
        try:
            for ask, _ in list(self._pending.values()):
                await self._send(socket, ask)
            while True:
                data = await socket.receive_bytes()
                message: FromHost = read_from_host(data)
                if isinstance(message, Reply):
                    self.arrived(message)
        except WebSocketDisconnect as error:
            return error.code == GOODBYE
        except (RuntimeError, KeyError):
            return False  # KeyError: a text message, which no host sends
        finally:
            if self._socket is socket:
                self._socket, self.away_since = None, time.monotonic()

    def give_up(self) -> None:
        """The host is not expected back: what waits for it fails."""
        self.given_up = True
        self.lost(f"the host of environment {self.env} is gone")

    async def drop(self) -> None:
        """Close the connection."""
        if self._socket is not None and self._socket.client_state is WebSocketState.CONNECTED:
            with contextlib.suppress(RuntimeError):  # it was closed at the same moment
                await self._socket.close(1012, "the service ends, or another host has taken its place")

    async def _send(self, socket: WebSocket, message: FromService) -> None:
        try:
            async with self._lock:
                await socket.send_bytes(encode(message))
        except (WebSocketDisconnect, RuntimeError):
            return  # seen by `serve`; a request is sent again


class Relay:
    """Plays an environment of this service for a run in another process of it.

    Args:
        find: the way to the environment as it is now; None: it is away.
        env: its name.
        socket: to the run.
    """

    def __init__(self, find: Callable[[], HostLink | None], env: str, socket: WebSocket) -> None:
        self._find, self._env, self._socket = find, env, socket
        self._prefix = f"{secrets.token_hex(4)}-"  # of its episodes' names, so that those of two runs differ
        self._lock = asyncio.Lock()
        self._open: dict[str, set[asyncio.Task[None]]] = {}
        """Requests under way, by episode."""

    async def serve(self) -> None:
        """Pass requests on until the run hangs up; then its episodes are closed."""
        try:
            while True:
                message = read_from_service(await self._socket.receive_bytes())
                if isinstance(message, Close):
                    self._close(message.episode)
                elif isinstance(message, Ask):
                    tasks = self._open.setdefault(message.episode, set())
                    task = asyncio.get_running_loop().create_task(self._pass_on(message))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
        except (WebSocketDisconnect, RuntimeError, KeyError):
            return
        finally:
            for episode in list(self._open):
                self._close(episode)

    def _close(self, episode: str) -> None:
        for task in self._open.pop(episode, ()):  # one that has passed its time limit at the run
            task.cancel()
        link = self._find()
        if link is not None:
            link.close_episode(self._prefix + episode)

    async def _pass_on(self, ask: Ask) -> None:
        make: Callable[[int], Any] = lambda id: msgspec.structs.replace(ask, id=id, episode=self._prefix + ask.episode)
        try:
            link = self._find()
            if link is None:
                raise EnvError(f"the host of environment {self._env} is gone")
            reply = Reply(ask.id, await link.ask(make))
        except RelaxError as error:
            reply = Reply(ask.id, error=told(error))
        try:
            async with self._lock:
                await self._socket.send_bytes(encode(reply))
        except (WebSocketDisconnect, RuntimeError):
            return

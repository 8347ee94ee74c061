"""`RelayLink`: from the processes of a run, or from another worker, to an environment that the service plays."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from relax_sdk.errors import EnvError
from relax_sdk.hosting.protocol import FromService, Reply, encode, read_from_host
from relax_sdk.media import MediaStore
from relax_server.rollout.hosted import HostLink

OPEN_SECONDS = 30.0
MAX_MESSAGE = 256 << 20
"""Bytes."""


class RelayLink(HostLink):
    """Asks the service, which asks the host. Can be pickled; connects when it is first asked.

    Args:
        env: its name at the service.
        url: of the service's relay.
        secret: the run's or the worker's own key to it.
        media: the service's folder of media, which is also that of the run.
    """

    def __init__(self, env: str, url: str, secret: str, media: Path) -> None:
        super().__init__(env, MediaStore(media), _in_thread)
        self.url, self.media, self._secret = url, media, secret
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._listening: asyncio.Task[None] | None = None
        self._opening: asyncio.Lock | None = None

    def __reduce__(self) -> Any:
        return RelayLink, (self.env, self.url, self._secret, self.media)

    def leads_as(self, other: RelayLink) -> bool:
        """Whether another one leads to the same host."""
        return (self.env, self.url, self._secret) == (other.env, other.url, other._secret)

    async def close(self) -> None:
        """Hang up: what is asked fails."""
        if self._listening is not None:
            self._listening.cancel()
        if self._session is not None:
            await self._session.close()
        self.lost(f"environment {self.env} is played no more")

    async def send(self, message: FromService) -> None:
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._socket is None or self._socket.closed:
                await self._open()
        assert self._socket is not None
        try:
            await self._socket.send_bytes(encode(message))
        except (ConnectionError, aiohttp.ClientError) as error:
            raise EnvError(f"the service of environment {self.env} is gone ({error})") from error

    async def _open(self) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=OPEN_SECONDS))
        try:
            self._socket = await self._session.ws_connect(
                self.url, headers={"Authorization": f"Bearer {self._secret}"}, max_msg_size=MAX_MESSAGE, heartbeat=30.0
            )
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            raise EnvError(f"the service of environment {self.env} cannot be reached ({error})") from error
        self._listening = asyncio.create_task(self._listen(self._socket))

    async def _listen(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        try:
            async for message in socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    reply = read_from_host(message.data)
                    if isinstance(reply, Reply):
                        self.arrived(reply)
        finally:
            self.lost(f"the service of environment {self.env} has hung up")


async def _in_thread(function: Any, *arguments: Any, limit: float) -> Any:
    async with asyncio.timeout(limit):
        return await asyncio.to_thread(function, *arguments)

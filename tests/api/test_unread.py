"""Clients that do not read what they asked for are cut off; those that read slowly are not."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from relax_server.api.door.connections import Connections
from relax_server.api.door.limits import DoorLimits
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from test_door import GET, WAIT, serving, until

SIZE = 16 << 20
"""Bytes of an answer: more than the system takes over for a client."""
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
GO_ON = b"\x81\x80\0\0\0\0"
"""An empty text message of a client."""
SOON = DoorLimits(read_seconds=0.3)


async def large(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with `SIZE` bytes."""
    await PlainTextResponse(b"a" * SIZE)(scope, receive, send)


async def ask(port: int, request: bytes = GET) -> socket.socket:
    """A client that asks, and reads nothing by itself."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, request)
    return client


async def read_all(client: socket.socket) -> int:
    """Bytes that come until the connection ends."""
    n, loop = 0, asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        while data := await loop.sock_recv(client, 1 << 20):
            n += len(data)
    return n


async def test_who_does_not_read_is_cut_off() -> None:
    connections = Connections(SOON, 10)
    async with serving(connections, large) as port:
        with await ask(port) as client:
            await until(lambda: connections.unread.size > 1 << 20)
            await until(lambda: not connections.open)
            assert (connections.unread.cut, connections.unread.size, connections.unread.held) == (1, 0, {})
            assert await read_all(client) < SIZE
    assert {row[0]: row[3][""] for row in connections.readings()}["relax_connections_cut"] == 1


async def test_who_reads_slowly_is_not_cut_off() -> None:
    connections, loop = Connections(SOON, 10), asyncio.get_running_loop()
    async with serving(connections, large) as port:
        with await ask(port) as client:
            n, began = 0, loop.time()
            while n < SIZE:
                data = await asyncio.wait_for(loop.sock_recv(client, 1 << 20), WAIT)
                assert data, n
                n += len(data)
                if loop.time() - began < 3 * SOON.read_seconds:
                    await asyncio.sleep(0.001)
            await until(lambda: not connections.unread.held)
            assert connections.unread.cut == connections.unread.size == 0


async def test_all_together_may_have_so_many_bytes_unread() -> None:
    connections = Connections(DoorLimits(unread_bytes=3 * SIZE), 10)
    async with serving(connections, large) as port:
        clients = [await ask(port) for _ in range(6)]
        await until(lambda: connections.unread.cut >= 2)
        await until(lambda: len(connections.unread.held) + connections.unread.cut == 6)
        assert SIZE < connections.unread.size <= 3 * SIZE
        for client in clients:
            client.close()


async def test_an_event_stream_that_is_not_read_is_cut_off() -> None:
    connections, ended = Connections(SOON, 10), asyncio.Event()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        async def events():
            try:
                while True:
                    yield ServerSentEvent(data="a" * 10_000)
                    await asyncio.sleep(0)
            finally:
                ended.set()

        await EventSourceResponse(events())(scope, receive, send)

    async with serving(connections, stream) as port:
        with await ask(port):
            await asyncio.wait_for(ended.wait(), WAIT)
            assert connections.unread.cut == 1 and connections.unread.size == 0


async def test_a_socket_whose_messages_are_not_read_is_cut_off() -> None:
    connections, ended = Connections(SOON, 10), asyncio.Event()

    async def talk(scope: Scope, receive: Receive, send: Send) -> None:
        told = WebSocket(scope, receive, send)
        await told.accept()
        with contextlib.suppress(WebSocketDisconnect):
            await told.receive_text()
            while True:
                await told.send_bytes(b"a" * 100_000)
                await asyncio.sleep(0)
        ended.set()

    async with serving(connections, talk) as port:
        with await ask(port, UPGRADE) as client:
            assert (await asyncio.get_running_loop().sock_recv(client, 12)).startswith(b"HTTP/1.1 101")
            await asyncio.get_running_loop().sock_sendall(client, GO_ON)
            await asyncio.wait_for(ended.wait(), WAIT)
            assert connections.unread.cut == 1 and not connections.unread.held

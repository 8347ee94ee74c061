"""Connections that several workers serve: each request goes to the worker that it belongs to, over one connection."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest
import uvicorn
import uvloop
import websockets
from relax_server.api.door.connections import HEAD_BYTES, Connections
from relax_server.api.door.limits import DoorLimits
from relax_server.api.routes import docs, engines, envs, health, keys, pausing, results, rollouts, runs, sessions
from relax_server.api.workers.board import Board
from relax_server.api.workers.channel import Channel, inboxes
from relax_server.api.workers.handover import Handover, RoutedHttp
from relax_server.api.workers.head import RequestHead, read_head
from relax_server.api.workers.place import WorkerPlace
from relax_server.api.workers.routing import SLACK, TABLE, Routing, Serves, serves
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

WAIT = 30.0
LIMITS = DoorLimits(header_seconds=0.5, body_seconds=0.5)


# ------------------------------------------------------------------------------------------------------------------- heads


def head(data: bytes) -> RequestHead:
    found = read_head(data)
    assert found is not None
    return found


def test_a_head_is_read_when_it_is_whole_and_not_before() -> None:
    data = b"\r\nPOST /v1/sessions/s_1.ab/step?x=/y HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\n\r\n"
    for cut in range(len(data)):
        assert read_head(data[:cut]) is None
    whole = head(data + b"hello, world")
    assert (whole.size, whole.method, whole.path, whole.body) == (len(data), "POST", "/v1/sessions/s_1.ab/step", 12)


@pytest.mark.parametrize(
    ("line", "path"),
    [
        (b"GET / HTTP/1.1", "/"),
        (b"GET http://host:1/v1/sessions/s_2.ab HTTP/1.1", "/v1/sessions/s_2.ab"),
        (b"GET http://host?x HTTP/1.1", "/"),
        (b"GET /v1/%73essions/s_2%2eab?q HTTP/1.1", "/v1/sessions/s_2.ab"),
        (b"GET", ""),
        (b"GET \xff\xfe HTTP/1.1", "ÿþ"),
    ],
)
def test_paths_of_requests(line: bytes, path: str) -> None:
    assert head(line + b"\r\n\r\n").path == path


@pytest.mark.parametrize(
    ("fields", "secret", "body"),
    [
        (b"", "", 0),
        (b"AUTHORIZATION:  bearer  rls_1.ab \r\n", "rls_1.ab", 0),
        (b"Authorization: Basic abc\r\nX-Api-Key: rls_2.cd\r\n", "rls_2.cd", 0),
        (b"Content-Length: 7\r\n", "", 7),
        (b"content-length: -7\r\n", "", 0),
        (b"Content-Length: 7\r\nTransfer-Encoding: chunked\r\n", "", None),
        (b"X-Content-Length: 7\r\n", "", 0),
    ],
)
def test_fields_of_requests(fields: bytes, secret: str, body: int | None) -> None:
    found = head(b"GET / HTTP/1.1\r\n" + fields + b"\r\n")
    assert (found.secret, found.body) == (secret, body)


# ----------------------------------------------------------------------------------------------------------------- routing


@pytest.mark.parametrize(
    ("method", "path", "who"),
    [
        ("POST", "/v1/sessions", Serves.NEXT),
        ("POST", "/v1/sessions/", Serves.NEXT),
        ("GET", "/v1/sessions", Serves.ANYBODY),
        ("GET", "/v1/sessions/ws", Serves.NEXT),
        ("GET", "/v1/sessions/s_1.ab/ws", Serves.NAMED),
        ("DELETE", "/v1/sessions/s_1.ab", Serves.NAMED),
        ("POST", "/v1/openai/v1/chat/completions", Serves.KEYED),
        ("POST", "/v1/chat/completions", Serves.NEAREST),
        ("GET", "/v1/rollouts/r_1/events", Serves.HOME),
        ("GET", "/v1/env-host", Serves.HOME),
        ("GET", "/healthz", Serves.ANYBODY),
        ("GET", "/v1/healthz", Serves.ANYBODY),
        ("GET", "/", Serves.ANYBODY),
        ("GET", "", Serves.ANYBODY),
        ("GET", "/v1", Serves.ANYBODY),
        ("GET", "/elsewhere/v1/rollouts", Serves.ANYBODY),
    ],
)
def test_who_serves(method: str, path: str, who: Serves) -> None:
    assert serves(method, path) is who


def test_every_route_is_in_the_table() -> None:
    modules = (docs, health, envs, sessions, rollouts, runs, engines, pausing, results, keys)
    paths = [route.path for module in modules for route in module.router.routes]  # type: ignore[attr-defined]
    assert len(paths) > 50
    for path in [*paths, "/openapi.json", "/v1/sessions/{id}/ws", "/v1/openai/v1/models", "/v1/chat/completions"]:
        first, *rest = path.strip("/").split("/")
        assert (f"v1/{rest[0]}" if first == "v1" else first) in TABLE, path


def routed(place: WorkerPlace, path: str, method: str = "GET", fields: bytes = b"") -> int:
    return Routing(place).worker(head(f"{method} {path} HTTP/1.1\r\n".encode() + fields + b"\r\n"))


def board(*sessions: int | None) -> Board:
    it = Board()
    for worker, count in enumerate(sessions):
        if count is not None:
            it.set_up(worker, True)
            it.set_sessions(worker, count)
    return it


def test_requests_about_a_session_go_to_its_worker() -> None:
    place = WorkerPlace(1, 3, board=board(0, 0, 0))
    assert routed(place, "/v1/sessions/s_2.ab/step") == 2
    assert routed(place, "/v1/sessions/s_ab/step") == 0
    assert routed(place, "/v1/sessions/s_7.ab/step") == 1, "of a service that had more workers"
    assert routed(place, "/v1/openai/v1/models", fields=b"Authorization: Bearer rls_2.ab\r\n") == 2
    assert routed(place, "/v1/rollouts") == 0 and routed(place, "/v1/models") == 1


def test_new_sessions_are_spread_evenly() -> None:
    place = WorkerPlace(0, 3, board=board(0, 0, 0))
    routing, post = Routing(place), head(b"POST /v1/sessions HTTP/1.1\r\n\r\n")
    assert sorted(routing.worker(post) for _ in range(9)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    place.board.set_sessions(1, SLACK + 1)
    assert {routing.worker(post) for _ in range(9)} == {0, 2}, "not to one that has more than others"
    place.board.set_up(2, False)
    assert {routing.worker(post) for _ in range(9)} == {0}, "not to one that is not there"


def test_a_model_call_outside_of_sessions_stays_where_it_is_unless_there_is_much_to_do() -> None:
    one_call = "/v1/chat/completions"
    assert routed(WorkerPlace(1, 2, board=board(0, SLACK)), one_call, "POST") == 1
    assert routed(WorkerPlace(1, 2, board=board(0, SLACK + 1)), one_call, "POST") == 0


# ---------------------------------------------------------------------------------------------------------------- handing


async def answers(index: int, scope: Scope, receive: Receive, send: Send) -> None:
    """Says which worker it is, and the size of the body."""
    if scope["type"] == "websocket":
        talk = WebSocket(scope, receive, send)
        await talk.accept()
        with contextlib.suppress(Exception):
            while True:
                await talk.send_text(f"{index}: {await talk.receive_text()}")
    elif scope["type"] == "http" and scope["path"].endswith("/stream"):

        async def pieces() -> AsyncIterator[str]:
            for number in range(5):
                yield f"{index}.{number} "
                await asyncio.sleep(0.01)

        await StreamingResponse(pieces())(scope, receive, send)
    elif scope["type"] == "http" and scope["path"].endswith("/long"):
        await PlainTextResponse(str(index) * LONG)(scope, receive, send)
    elif scope["type"] == "http":
        await PlainTextResponse(f"{index}:{len(await Request(scope, receive).body())}")(scope, receive, send)


LONG = 8 << 20


class Workers:
    """Workers in one event loop, each with a server of its own, on one listening socket of the first."""

    def __init__(self) -> None:
        self.places: list[WorkerPlace] = []
        self.connections: list[Connections] = []
        self.port = 0


@contextlib.asynccontextmanager
async def workers(count: int = 2) -> AsyncIterator[Workers]:
    ends, file, it = inboxes(range(count)), Board.make(), Workers()
    outboxes = {number: written for number, (_, written) in ends.items()}
    servers, channels, running = [], [], []
    for number in range(count):
        channel = Channel(number, ends[number][0], outboxes)
        place = WorkerPlace(number, count, channel, Board(file))
        handover, connections = Handover(place), Connections(LIMITS, 100)
        config = uvicorn.Config(
            functools.partial(answers, number), interface="asgi3", log_config=None, lifespan="off", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(connections.configure(config, functools.partial(RoutedHttp, handover)))
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        listener = socket.create_server(("127.0.0.1", 0))
        running.append(asyncio.create_task(server.serve([listener])))
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        make = functools.partial(config.http_protocol_class, config=config, server_state=server.server_state, app_state={})
        handover.begin(make)  # type: ignore[arg-type]
        channel.listen()
        place.board.set_up(number, True)
        it.port = it.port or listener.getsockname()[1]
        it.places.append(place)
        it.connections.append(connections)
        servers.append(server)
        channels.append(channel)
    os.close(file)
    try:
        yield it
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*running)
        for channel in channels:
            channel.close()
        for pair in ends.values():
            for end in pair:
                end.close()


Ask = Callable[..., Awaitable[bytes]]


class Client:
    """One connection, of which every answer is read before the next request is sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, *pieces: bytes) -> bytes:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0.01)
        return await self.answer()

    async def answer(self) -> bytes:
        """The body of the next answer."""
        raw = await self.reader.readuntil(b"\r\n\r\n")
        if b"content-length" in raw:
            return await self.reader.readexactly(int(raw.split(b"content-length: ")[1].split(b"\r\n")[0]))
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readline()
        return body


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2 * LONG)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


def request(worker: int, more: str = "", *fields: str, body: bytes = b"") -> bytes:
    """A request about a session of a worker."""
    lines = [f"POST /v1/sessions/s_{worker}.ab{more} HTTP/1.1", "Host: x", *fields]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a test's coroutine in one kind of event loop."""

    def in_loop(test: Coroutine[Any, Any, None]) -> None:
        async def limited() -> None:
            async with asyncio.timeout(WAIT):
                await test

        with asyncio.Runner(loop_factory=uvloop.new_event_loop if request.param == "uvloop" else None) as runner:
            runner.run(limited())

    return in_loop


Run = Callable[[Coroutine[Any, Any, None]], None]


def test_one_connection_serves_sessions_of_two_workers(run: Run) -> None:
    async def test() -> None:
        async with workers() as it, connected(it.port) as client:
            for turn in range(20):
                assert await client.ask(request(turn % 2, body=b"x" * turn)) == f"{turn % 2}:{turn}".encode()
            assert [len(c.open) for c in it.connections] == [0, 1], "it is counted where it is"
        assert [len(c.open) for c in it.connections] == [0, 0]

    run(test())


def test_requests_and_bodies_in_pieces(run: Run) -> None:
    chunked = request(1, "", "Transfer-Encoding: chunked")

    async def test() -> None:
        async with workers() as it, connected(it.port) as client:
            for worker in (1, 0, 1):
                data = request(worker, body=b"y" * 1000)
                assert await client.ask(data[:20], data[20:60], data[60:200], data[200:]) == b"%d:1000" % worker
            assert await client.ask(chunked, b"4\r\nab\r\n\r", b"\n", b"6\r\n\r\n\r\n\r\n\r\n0\r\n\r", b"\n") == b"1:10"
            assert await client.ask(request(0, body=b"z" * 3_000_000)) == b"0:3000000"
            assert await client.ask(request(1, body=b"z" * 3_000_000)) == b"1:3000000"

    run(test())


def test_requests_that_do_not_wait_for_answers_are_each_answered_by_their_worker_in_order(run: Run) -> None:
    dice = random.Random(7)
    wanted = [(dice.randrange(3), dice.choice([0, 1, 50, 5000]), dice.random() < 0.3) for _ in range(60)]
    data = b""
    for worker, size, chunked in wanted:
        if chunked:
            content = b"%x\r\n" % size + b"\n" * size + b"\r\n" if size else b""
            data += request(worker, "", "Transfer-Encoding: chunked") + content + b"0\r\n\r\n"
        else:
            data += request(worker, body=b"\r\n" * (size // 2) + b"c" * (size % 2))

    async def test() -> None:
        async with workers(3) as it, connected(it.port) as client:
            rest = data
            while rest:
                cut = dice.choice([1, 7, 100, 1000, 20_000])
                client.writer.write(rest[:cut])
                rest = rest[cut:]
                if dice.random() < 0.3:
                    await asyncio.sleep(0)
            assert [await client.answer() for _ in wanted] == [b"%d:%d" % (worker, size) for worker, size, _ in wanted]

    run(test())


def test_an_answer_leaves_before_the_connection_does(run: Run) -> None:
    async def test() -> None:
        async with workers() as it, connected(it.port) as client:
            client.writer.write(request(0, "/long") + request(1, "/stream") + request(0))
            await asyncio.sleep(0.1)  # the first answer fills all buffers, and the second request waits for it
            assert await client.answer() == b"0" * LONG
            assert await client.answer() == b"1.0 1.1 1.2 1.3 1.4 "
            assert await client.answer() == b"0:0"

    run(test())


def test_a_websocket_goes_to_the_worker_of_its_session(run: Run) -> None:
    async def test() -> None:
        async with workers() as it:
            for worker in (0, 1):
                url = f"ws://127.0.0.1:{it.port}/v1/sessions/s_{worker}.ab/ws"
                async with websockets.connect(url) as talk:
                    for text in ("hello", "x" * 500_000):
                        await talk.send(text)
                        assert await talk.recv() == f"{worker}: {text}"
                    assert [len(c.open) for c in it.connections] == [1 - worker, worker]

    run(test())


def test_a_worker_that_is_not_there_is_told_of(run: Run) -> None:
    async def test() -> None:
        async with workers() as it, connected(it.port) as client:
            assert await client.ask(request(0)) == b"0:0"
            it.places[0].board.set_up(1, False)
            client.writer.write(request(1))
            raw = await client.reader.read()
            assert raw.startswith(b"HTTP/1.1 503 ") and b"worker_unavailable" in raw and b"Retry-After" in raw

    run(test())


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([b"POST /v1/sessions/s_1.ab HTTP/1.1\r\nHost: x\r\nX-Slow: "], 408),
        ([request(1), b"GET / HTTP/1.1\r\nX-"], 408),
        ([request(1, "", "Content-Length: 10"), b"half"], 408),
        ([b"GET / HTTP/1.1\r\nX-Long: " + b"a" * HEAD_BYTES], 431),
        ([b"GET / HTTP/1.1\r\nX-Long: " + b"a" * HEAD_BYTES + b"\r\n\r\n"], 431),
        ([b"nonsense\r\n\r\n"], 400),
        ([request(1, "", "Content-Length: 4", "Content-Length: 9"), b"123456789"], 400),
        ([request(1, "", "Content-Length: 4", "Transfer-Encoding: chunked"), b"0\r\n\r\n" + request(0)], 400),
        ([request(1, "", "Transfer-Encoding: identity"), b"x"], 400),
    ],
)
def test_requests_that_cannot_be_understood_are_refused(run: Run, pieces: list[bytes], status: int) -> None:
    async def test() -> None:
        async with workers() as it, connected(it.port) as client:
            for piece in pieces:
                client.writer.write(piece)
                await asyncio.sleep(0.02)
            raw = await client.reader.read()
            assert f"HTTP/1.1 {status} ".encode() in raw, raw
            assert b"\r\n\r\n0:" not in raw, "what follows it is served by nobody"
            async with connected(it.port) as other:
                assert await other.ask(request(1)) == b"1:0"

    run(test())


def test_a_full_inbox_refuses_connections_and_loses_none(run: Run) -> None:
    async def test() -> None:
        async with workers() as it:
            it.places[1]._channel.close()  # type: ignore[union-attr]
            refused = []
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(40):
                    client = await stack.enter_async_context(connected(it.port))
                    client.writer.write(request(1, body=b"x" * 60_000))
                    refused.append(client)
                await asyncio.sleep(0.1)
                it.places[1]._channel.listen()  # type: ignore[union-attr]
                statuses = [(await client.reader.readline()).split()[1] for client in refused]
                assert set(statuses) == {b"200", b"503"}

    run(test())

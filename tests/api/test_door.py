"""What a request passes before the application: connections, time-outs, sizes, keys before bodies, and pages of other sites."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest
import uvicorn
import websockets
from relax_server.api.door.bodies import BoundedBodies
from relax_server.api.door.connections import HEAD_BYTES, Connections
from relax_server.api.door.limits import KEPT_FILES, DoorLimits, connections_allowed
from relax_server.api.keys import KeyRing
from relax_server.api.settings import ServiceConfig
from relax_server.gateway.browsers import HEADERS, OwnPages
from relax_server.journal.sql import SqlJournal
from service_process import Service, start
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

import relax_sdk as relax

WAIT = 20.0
"""Seconds that nothing here should need."""


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the size of the body; a WebSocket is told what it says."""
    if scope["type"] == "websocket":
        talk = WebSocket(scope, receive, send)
        await talk.accept()
        with contextlib.suppress(Exception):
            while True:
                await talk.send_text(await talk.receive_text())
    elif scope["type"] == "http":
        body = await Request(scope, receive).body()
        await PlainTextResponse(str(len(body)))(scope, receive, send)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(connections: Connections, app=echo) -> AsyncIterator[int]:
    """A server of ours with an application; gives its port."""
    config = uvicorn.Config(app, log_config=None, lifespan="off", headers=HEADERS, timeout_graceful_shutdown=1)
    server = uvicorn.Server(connections.configure(config))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    listener = socket.create_server(("127.0.0.1", 0))
    running = asyncio.create_task(server.serve([listener]))
    await until(lambda: server.started)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await running


async def say(port: int, *pieces: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    return reader, writer


async def answer(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Status and body of an answer after which the connection is closed."""
    async with asyncio.timeout(WAIT):
        raw = await reader.read()
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, body.decode()


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LATE = DoorLimits(header_seconds=0.2, body_seconds=0.4)


@pytest.mark.parametrize(
    ("sent", "what"),
    [
        (b"", "headers"),
        (b"\r\n", "headers"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ", "headers"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf", "body"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", "body"),
        (GET + b"POST / HTTP/1.1\r\nHost: x\r\nContent-", "headers"),
    ],
)
async def test_a_client_that_does_not_go_on_is_answered_and_cut_off(sent: bytes, what: str) -> None:
    connections = Connections(LATE, 10)
    async with serving(connections) as port:
        reader, writer = await say(port, sent)
        async with asyncio.timeout(WAIT):
            raw = (await reader.read()).decode()
        assert "HTTP/1.1 408" in raw and f"the {what} of the request did not come" in raw
        assert not connections.open
        writer.close()


async def test_a_client_that_sends_a_little_now_and_then_is_cut_off_all_the_same() -> None:
    async with serving(Connections(LATE, 10)) as port:
        reader, writer = await say(port, b"GET / HTTP/1.1\r\nHost: x\r\n")

        async def drip() -> None:
            with contextlib.suppress(OSError):
                while True:
                    writer.write(b"X-A: b\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        assert (await answer(reader))[0] == 408
        dripping.cancel()


async def test_an_answer_may_take_longer_than_its_request(monkeypatch) -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        await asyncio.sleep(3 * LATE.body_seconds)
        await PlainTextResponse("at last")(scope, receive, send)

    async with serving(Connections(LATE, 10), slow) as port:
        reader, _ = await say(port, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nab", b"c")
        async with asyncio.timeout(WAIT):
            assert b"200 OK" in await reader.readuntil(b"at last")


async def test_headers_without_an_end_are_refused() -> None:
    async with serving(Connections(DoorLimits(), 10)) as port:
        reader, writer = await say(port, b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: ")
        with contextlib.suppress(OSError):
            for _ in range(HEAD_BYTES // 1024 + 2):
                writer.write(b"a" * 1024)
                await writer.drain()
        async with asyncio.timeout(WAIT):
            assert b"HTTP/1.1 431" in await reader.read(100)


async def test_one_address_may_have_so_many_connections() -> None:
    connections = Connections(DoorLimits(connections_per_address=2), 10)
    async with serving(connections) as port:
        first, second = await say(port, GET), await say(port, GET)
        reader, _ = await say(port, GET)
        status, body = await answer(reader)
        assert status == 503 and "127.0.0.1 has 2 connections open" in json.loads(body)["error"]["message"]
        first[1].close()
        await until(lambda: len(connections.open) == 1)
        reader, _ = await say(port, GET)
        assert b"200 OK" in await asyncio.wait_for(reader.readline(), WAIT)
        second[1].close()
        assert {row[0]: row[3][""] for row in connections.readings()}["relax_connections_refused"] == 1


async def test_connections_of_a_proxy_are_not_limited_one_by_one() -> None:
    connections = Connections(DoorLimits(connections_per_address=1), 10, ["127.0.0.0/8"])
    async with serving(connections) as port:
        for _ in range(4):
            reader, _ = await say(port, GET)
            assert b"200 OK" in await asyncio.wait_for(reader.readline(), WAIT)


async def test_silent_connections_make_room_for_those_that_ask() -> None:
    connections = Connections(DoorLimits(), 4, ["127.0.0.1"])
    async with serving(connections) as port:
        silent = [await say(port) for _ in range(4)]
        reader, _ = await say(port, GET)
        assert b"200 OK" in await asyncio.wait_for(reader.readline(), WAIT)
        assert await asyncio.wait_for(silent[0][0].read(), WAIT) == b"", "the oldest one was closed"
        assert len(connections.open) == 4


async def test_connections_at_work_are_not_closed_for_others() -> None:
    connections = Connections(DoorLimits(), 2, ["127.0.0.1"])
    async with serving(connections) as port:
        async with websockets.connect(f"ws://127.0.0.1:{port}/") as talk:
            _, half = await say(port, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf")
            await until(lambda: [p is None or not p.idle for _, p in connections.open.values()] == [True, True])
            reader, _ = await say(port, GET)
            status, body = await answer(reader)
            assert status == 503 and "as many as it may have" in body
            await talk.send("still here")
            assert await talk.recv() == "still here"
            half.close()
        await until(lambda: not connections.open)


async def test_a_websocket_is_open_for_longer_than_headers_may_take() -> None:
    async with serving(Connections(LATE, 10)) as port, websockets.connect(f"ws://127.0.0.1:{port}/") as talk:
        await talk.send("hello")
        assert await talk.recv() == "hello"
        await asyncio.sleep(2 * LATE.header_seconds)
        await talk.send("still here")
        assert await talk.recv() == "still here"


async def test_a_connection_is_kept_for_longer_than_clients_keep_theirs() -> None:
    async with serving(Connections(DoorLimits(), 10)) as port:
        reader, writer = await say(port, GET)
        await asyncio.wait_for(reader.readuntil(b"200 OK"), WAIT)
        await asyncio.sleep(5.5)  # httpx, and so the client of OpenAI, lets go of a connection after five seconds
        writer.write(GET)
        await asyncio.wait_for(reader.readuntil(b"200 OK"), WAIT)


def test_no_address_may_have_all_connections() -> None:
    assert Connections(DoorLimits(), 400).each == 300 and Connections(DoorLimits(), 1).each == 1
    assert Connections(DoorLimits(connections_per_address=10), 400).each == 10


def test_open_files_bound_connections(monkeypatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 2048))
    raised = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, values: raised.append(values))
    assert connections_allowed(100) == 100 and connections_allowed(100_000) == 2048 - KEPT_FILES
    assert raised[0] == (2048, 2048)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"connections": 0}, {"header_seconds": 0}, {"body_seconds": float("inf")}, {"json_bytes": 10}),
        *({"read_seconds": 0}, {"unread_bytes": 10}, {"refusals_per_second": 0}),
    ],
)
def test_limits_that_make_no_sense_are_refused(wrong) -> None:
    with pytest.raises(relax.ConfigError, match=next(iter(wrong))):
        DoorLimits(**wrong)


def test_a_proxy_is_named_by_its_address(tmp_path) -> None:
    with pytest.raises(relax.ConfigError, match="no IP address"):
        ServiceConfig(tmp_path, proxies=("my-proxy",))


# ------------------------------------------------------------------------------------------------------ pages and bodies


async def passes(app, **scope) -> int:
    """The status of a request to an application; 200 is its own."""
    status = 0

    async def receive():
        return {"type": "http.request", "body": b"x" * 50, "more_body": scope.get("endless", False)}

    async def send(message) -> None:
        nonlocal status
        status = message.get("status", status)

    headers = [(name.encode(), value.encode()) for name, value in scope.pop("headers", {}).items()]
    base = {"type": "http", "method": "POST", "path": "/v1/sessions", "scheme": "http", "headers": headers}
    await app(base | scope, receive, send)
    return status


JSON = {"content-type": "application/json", "content-length": "2", "host": "localhost:8000"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://localhost:8000"}, 200),
        ({"origin": "http://LOCALHOST:8000", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://localhost:9000"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:8000@evil.example"}, 403),
        ({"origin": "http://["}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "Text/Plain; charset=utf-8"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": ""}, 415),
    ],
)
async def test_pages_of_other_sites_may_do_nothing(headers: dict[str, str], status: int) -> None:
    assert await passes(OwnPages(echo), headers=JSON | headers) == status


async def test_a_link_may_be_followed_and_a_default_port_is_the_same_place() -> None:
    page = {"host": "gym.example", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert await passes(OwnPages(echo), method="GET", path="/docs", headers=page) == 200
    assert await passes(OwnPages(echo), method="POST", headers=page) == 403
    same = {"host": "gym.example", "origin": "https://gym.example:443"}
    assert await passes(OwnPages(echo), scheme="https", headers=same) == 200


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/sessions", {"content-length": "1000"}, 200),
        ("/v1/sessions", {"content-length": "1001"}, 413),
        ("/v1/rollouts", {"transfer-encoding": "chunked"}, 413),
        ("/v1/sessions/s_1/openai/v1/chat/completions", {"content-length": "9000"}, 200),
        ("/v1/openai/v1/responses", {"content-length": "10001"}, 413),
        ("/v1/media/image", {"transfer-encoding": "chunked"}, 413),
        ("/v1/envs", {"content-length": "9000"}, 200),
    ],
)
async def test_bodies_have_the_limit_of_their_route(path: str, headers: dict[str, str], status: int) -> None:
    app = BoundedBodies(_swallow, large=10_000, small=1000)
    assert await passes(app, path=path, headers=headers, endless="transfer-encoding" in headers) == status


async def _swallow(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads until there is no more only where the length is not told."""
    if any(name == b"transfer-encoding" for name, _ in scope["headers"]):
        async for _ in Request(scope, receive).stream():
            pass
    await PlainTextResponse("read")(scope, receive, send)


# ------------------------------------------------------------------------------------------------------ a real service


def stream(n: int) -> Iterator[bytes]:
    for _ in range(n):
        yield b" " * (1 << 20)


def test_the_key_is_looked_at_before_the_body(locked: Service) -> None:
    host, port = locked.url.removeprefix("http://").split(":")
    for path in ("/v1/sessions", "/v1/rollouts", "/v1/envs", "/v1/keys", "/v1/media/image", "/v1/openai/v1/chat/completions"):
        with socket.create_connection((host, int(port)), timeout=WAIT) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(
                f"{head}Transfer-Encoding: chunked\r\n\r\n".encode()
            )  # and nothing else: the answer comes all the same
            assert connection.recv(100).startswith(b"HTTP/1.1 401"), path


def test_nothing_is_shown_without_a_key(locked: Service) -> None:
    with locked.client("") as client:
        for path in ("/docs", "/docs/start.js", "/openapi.json", "/v1/models", "/v1/openai/v1/models", "/v1/nothing"):
            assert client.get(path).status_code == 401, path
        assert client.get("/healthz").status_code == client.get("/metrics").status_code == 200


def test_a_body_that_does_not_end_is_not_kept(service: Service) -> None:
    import psutil

    process, headers = psutil.Process(service.process.pid), {"Content-Type": "application/json"}
    before = process.memory_info().rss
    for path in ("/v1/sessions", "/v1/rollouts", "/v1/keys"):
        with service.client() as client:
            try:
                answered = client.post(path, content=stream(200), headers=headers)
            except httpx.HTTPError:  # it was cut off while it sent
                continue
        assert answered.status_code == 413 and answered.json()["error"]["code"] == "too_large"
    assert process.memory_info().rss - before < 100 << 20
    assert httpx.get(service.url + "/healthz").status_code == 200


async def test_a_page_of_another_site_may_not_open_a_socket(service: Service) -> None:
    url = service.url.replace("http", "ws")
    for path in ("/v1/sessions/ws", "/v1/env-host"):
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(url + path, origin="http://evil.example").__aenter__()  # type: ignore[arg-type]
        assert refused.value.response.status_code == 403
    async with websockets.connect(url + "/v1/sessions/ws", origin=service.url):  # type: ignore[arg-type]
        pass


def test_a_page_of_another_site_may_not_store_media(service: Service) -> None:
    with service.client() as client:
        plain = {"Content-Type": "text/plain"}
        assert (
            client.post("/v1/media/image", content=b"x", headers=plain | {"Origin": "http://evil.example"}).status_code == 403
        )
        assert client.post("/v1/media/image", content=b"x", headers=plain).status_code == 415
        assert client.post("/v1/pause", headers={"Origin": "http://evil.example"}).status_code == 403


def test_every_answer_has_the_headers_that_browsers_obey(service: Service) -> None:
    with service.client() as client:
        image = relax.Image.from_array(__import__("numpy").zeros((8, 8, 3), "uint8"))
        sent = {"Content-Type": "image/png"}
        sha256 = client.post("/v1/media/image", content=image.bytes(), headers=sent).raise_for_status().json()["sha256"]
        media = client.get(f"/v1/media/{sha256}")
        for answered in (media, client.get("/docs"), client.get("/v1/nothing"), client.post("/v1/sessions", content=b"{")):
            for name, value in HEADERS:
                assert value in answered.headers[name], (answered.url, name)
        assert media.headers["content-type"] == "image/png" and media.headers["cache-control"].startswith("private")
        assert "sandbox" in media.headers["content-security-policy"]


def test_the_page_of_routes_loads_everything_from_the_service(service: Service) -> None:
    with service.client() as client:
        page = client.get("/docs").raise_for_status().text
        loaded = re.findall(r'(?:href|src)="([^"]+)"', page)
        assert len(loaded) == 3 and not any("//" in url for url in loaded) and "<script>" not in page
        for url in loaded:
            assert client.get("/" + url).raise_for_status().content
        assert client.get("/docs/other.js").status_code == 400


def test_a_name_of_somebody_else_is_not_answered(service: Service, tmp_path) -> None:
    with service.client() as client:
        for path in ("/healthz", "/v1/envs"):
            assert client.get(path, headers={"Host": "evil.example"}).status_code == 400
            assert client.get(path, headers={"Host": "localhost:1"}).status_code == 200
    assert "gym.example" in ServiceConfig(tmp_path, host="0.0.0.0", allowed_hosts=("gym.example",)).hosts
    assert ServiceConfig(tmp_path, host="0.0.0.0").hosts == (), "there, the key decides"


def test_behind_a_proxy(locked: Service, tmp_path) -> None:
    arguments = ("--proxy", "127.0.0.1", "--allowed-host", "gym.example", "--drain-seconds", "0")
    command = [sys.executable, "-m", "relax_sdk.cli", "serve", "--folder", str(tmp_path), "--port", "0", *arguments]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1 and "relax keys add" in refused.stderr and "Traceback" not in refused.stderr

    journal = SqlJournal(tmp_path / "journal.db")
    secret, _ = KeyRing(journal).create("anybody", ["run"])
    journal.close()
    with locked.client() as client:
        engine = client.get("/v1/models").json()["engines"][0]["url"]
    behind = start(tmp_path, "--engine", engine, *arguments, key=secret)
    try:
        told = {"Host": "gym.example", "X-Forwarded-Proto": "https", "X-Forwarded-For": "203.0.113.7"}
        with behind.client() as client:
            opened = client.post("/v1/sessions", json={}, headers=told).raise_for_status().json()
            assert opened["base_url"].startswith("https://gym.example/v1/sessions/")
            page = told | {"Origin": "https://gym.example"}
            assert client.post("/v1/sessions", json={}, headers=page).status_code == 201
            assert client.get("/v1/envs", headers={"Host": "evil.example"}).status_code == 400
    finally:
        behind.stop()

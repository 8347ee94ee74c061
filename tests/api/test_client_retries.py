"""What `relax.Client` and `relax.AsyncClient` do again: which calls, after which answers, how often, and with what pauses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

import relax_sdk as relax

ROLLOUT = b'{"envs": [], "id": "r", "state": "running", "counts": {}, "error": null}'
SESSION = b'{"id": "s", "key": "", "base_url": "", "observation": [], "tools": [], "seed": 0, "trajectory_id": "t"}'


class Scripted:
    """A service whose answers are a list: a status, with its `Retry-After`; `hang up`; or how many events a stream gives.

    The last one is repeated. Events are numbered behind the one that the client has seen; number 12 is `finished`.
    """

    def __init__(self) -> None:
        self.script: list[int | tuple[int, str] | str] = [200]
        self.asked: list[str] = []
        self.answered = threading.Event()
        """Set when an answer was sent."""
        self.hung_up = threading.Event()
        """Set when the client ended a stream that goes on."""
        self._server = HTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path.endswith("/r"):
                    return self.answer(200, ROLLOUT)
                service.asked.append(f"{self.path} {self.headers.get('Last-Event-ID', '')}".strip())
                item = service.script.pop(0) if service.script[1:] else service.script[0]
                if item == "hang up":
                    self.close_connection = True
                elif isinstance(item, str):
                    self.events(item)
                else:
                    status, wait = item if isinstance(item, tuple) else (item, "")
                    body = SESSION if self.path.endswith("sessions") else ROLLOUT
                    self.answer(status, body if status == 200 else b'{"error": {"message": "busy", "code": "busy"}}', wait)

            do_POST = do_GET

            def events(self, number: str) -> None:
                first = int(self.headers["Last-Event-ID"]) + 1
                ids = range(first, first + 10) if number == "endless" else range(first, min(first + int(number), 13))
                kinds = {12: "finished"}
                lines = [f": ping\n\nid: {i}\nevent: {kinds.get(i, 'group')}\ndata: {{}}\n\n: ping\n\n" for i in ids]
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write("".join(lines).encode())
                if number == "endless" and self.rfile.read(1) == b"":
                    service.hung_up.set()

            def answer(self, status: int, body: bytes, wait: str = "") -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                if wait:
                    self.send_header("Retry-After", wait)
                self.end_headers()
                self.wfile.write(body)
                service.answered.set()

            def log_message(self, format: str, *args: object) -> None: ...

        return Handler

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def service() -> Iterator[Scripted]:
    made = Scripted()
    yield made
    made.close()


class Plain:
    """`relax.Client`, asked once."""

    def __init__(self, url: str) -> None:
        self.url = url

    def envs(self) -> Any:
        with relax.Client(self.url, timeout=10.0) as client:
            return client.envs()

    def session(self) -> Any:
        with relax.Client(self.url, timeout=10.0) as client:
            return client.session().id

    def events(self, number: int = 100) -> list[int]:
        with relax.Client(self.url, timeout=10.0) as client:
            events, seen = client.get_rollout("r").events(), []
            for event in events:
                seen.append(event.id)
                if len(seen) == number:
                    break
            events.close()
            return seen


class Asyncio(Plain):
    """`relax.AsyncClient`, asked once."""

    def envs(self) -> Any:
        async def ask() -> Any:
            async with relax.AsyncClient(self.url, timeout=10.0) as client:
                return await client.envs()

        return asyncio.run(ask())

    def session(self) -> Any:
        async def ask() -> Any:
            async with relax.AsyncClient(self.url, timeout=10.0) as client:
                return (await client.session()).id

        return asyncio.run(ask())

    def events(self, number: int = 100) -> list[int]:
        async def ask() -> list[int]:
            async with relax.AsyncClient(self.url, timeout=10.0) as client:
                events, seen = (await client.get_rollout("r")).events(), []
                async for event in events:
                    seen.append(event.id)
                    if len(seen) == number:
                        break
                await events.aclose()
                return seen

        return asyncio.run(ask())


@pytest.fixture(params=[Plain, Asyncio])
def client(request: pytest.FixtureRequest, service: Scripted) -> Plain:
    return request.param(service.url)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each pause; none is waited."""
    waited: list[float] = []
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        waited.append(seconds)
        await sleep(0)

    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setattr("asyncio.sleep", pause)
    return waited


def test_what_is_safe_is_repeated(client: Plain, service: Scripted, pauses: list[float]) -> None:
    service.script = [503, 429, 502, 504, "hang up", 200]
    assert client.envs() == [] and len(service.asked) == 6 and len(pauses) == 5


def test_pauses_grow_and_tries_come_to_an_end(client: Plain, service: Scripted, pauses: list[float]) -> None:
    service.script = [503]
    with pytest.raises(relax.ServiceUnavailable, match="busy"):
        client.envs()
    assert len(service.asked) == 8 and len(pauses) == 7
    assert 0.05 <= pauses[0] <= 0.2 and all(pauses[i] < pauses[i + 2] for i in range(4)) and max(pauses) <= 8.0
    assert sum(pauses) > 10.0, "a service that is started again is waited for"


def test_a_service_that_asks_to_wait_is_waited_for(client: Plain, service: Scripted, pauses: list[float]) -> None:
    service.script = [(429, "3"), (503, "600"), (503, "soon"), 200]
    assert client.envs() == []
    assert pauses[:2] == [3.0, 8.0] and pauses[2] <= 0.8


@pytest.mark.parametrize("status", [400, 404, 409, 500])
def test_a_refusal_is_final(client: Plain, service: Scripted, pauses: list[float], status: int) -> None:
    service.script = [status, 200]
    with pytest.raises(relax.ServiceError) as caught:
        client.envs()
    assert caught.value.status == status and len(service.asked) == 1 and pauses == []


@pytest.mark.parametrize("status", [429, 503])
def test_what_is_not_safe_is_repeated_when_nothing_was_done(
    client: Plain, service: Scripted, pauses: list[float], status: int
) -> None:
    service.script = [status, 200]
    assert client.session() == "s" and len(service.asked) == 2


@pytest.mark.parametrize("answer", [502, 504, "hang up"])
def test_what_is_not_safe_is_done_once(client: Plain, service: Scripted, pauses: list[float], answer: Any) -> None:
    service.script = [answer, 200]
    with pytest.raises(relax.ServiceUnavailable):
        client.session()
    assert len(service.asked) == 1 and pauses == []


def test_a_service_that_is_not_there(pauses: list[float]) -> None:
    for client in (Plain("http://127.0.0.1:9"), Asyncio("http://127.0.0.1:9")):
        with pytest.raises(relax.ServiceUnavailable, match="relax serve"):
            client.envs()
    assert len(pauses) == 14


def test_streams_go_on_where_they_broke_off(client: Plain, service: Scripted, pauses: list[float]) -> None:
    service.script = ["1"]  # eleven breaks: each event begins the count of tries anew
    assert client.events() == list(range(1, 13))
    assert service.asked == [f"/v1/rollouts/r/events {number}" for number in range(12)]


def test_a_stream_that_gives_nothing_comes_to_an_end(client: Plain, service: Scripted, pauses: list[float]) -> None:
    service.script = ["2", "0", 503, "hang up", "0"]
    with pytest.raises(relax.ServiceUnavailable, match="the stream of events ended early"):
        client.events()
    assert len(service.asked) == 8 and len(pauses) == 7


def test_a_refused_stream_is_not_opened_again(client: Plain, service: Scripted, pauses: list[float]) -> None:
    service.script = ["2", 404]
    with pytest.raises(relax.ServiceError):
        client.events()
    assert len(service.asked) == 2


def test_a_stream_that_nobody_follows_any_more_is_closed(client: Plain, service: Scripted) -> None:
    service.script = ["endless"]
    assert client.events(3) == [1, 2, 3]
    assert service.hung_up.wait(10.0) and len(service.asked) == 1


async def test_cancelling_ends_a_pause_at_once(service: Scripted) -> None:
    service.script = [(503, "8")]
    async with relax.AsyncClient(service.url) as client:
        asking = asyncio.create_task(client.envs())
        assert await asyncio.to_thread(service.answered.wait, 10.0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asking, 5.0)
    assert len(service.asked) == 1

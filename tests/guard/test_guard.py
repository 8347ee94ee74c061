"""Who is let in: the rules, and both ways in which servers keep them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from relax_server.guard import TOKEN, EngineGuard, Guard, GuardedApp, hosts_of, new_token
from relax_server.guard.inside.relax_guard import ADDRESS
from relax_server.guard.on_aiohttp import guarded

GUARD = Guard("t" * 32, hosts_of("127.0.0.1"), "the token of the tests")
KEY = {"authorization": "Bearer " + "t" * 32}
HERE = {"host": "127.0.0.1:8000"}
JSON = {"content-type": "application/json; charset=utf-8", "content-length": "2"}
ALLOWED: list[tuple[str, str, dict[str, str]]] = [
    ("GET", "/health", HERE),
    ("GET", "/health", HERE | {"sec-fetch-site": "none"}),
    ("POST", "/generate", HERE | KEY | JSON),
    ("POST", "/flush_cache", HERE | KEY),
    ("POST", "/flush_cache", HERE | KEY | {"content-length": "0"}),
    ("GET", "/server_info", {"host": "localhost"} | KEY),
    ("GET", "/server_info", {"host": "[::1]:8000"} | KEY),
    ("GET", "/server_info", HERE | {"authorization": "bearer " + "t" * 32}),
]
REFUSED: list[tuple[int, str, str, dict[str, str]]] = [
    (401, "GET", "/server_info", HERE),
    (401, "OPTIONS", "/generate", HERE),
    (401, "GET", "/health/", HERE),
    (401, "GET", "//health", HERE),
    (401, "POST", "/generate", HERE | JSON | {"authorization": "Bearer " + "x" * 32}),
    (401, "POST", "/generate", HERE | JSON | {"authorization": "Bearer "}),
    (401, "POST", "/generate", HERE | JSON | {"authorization": "t" * 32}),
    (401, "POST", "/generate", HERE | JSON | {"authorization": "Basic " + "t" * 32}),
    (401, "POST", "/generate", HERE | JSON | {"authorization": "Bearer \udce4\u00e4"}),
    (400, "GET", "/health", {"host": "attacker.example:8000"}),
    (400, "GET", "/health", {}),
    (400, "GET", "/server_info", {"host": "127.0.0.1.attacker.example"} | KEY),
    (403, "POST", "/generate", HERE | KEY | JSON | {"origin": "http://127.0.0.1:8000"}),
    (403, "POST", "/generate", HERE | KEY | JSON | {"origin": "null"}),
    (403, "GET", "/health", HERE | {"sec-fetch-site": "cross-site"}),
    (403, "GET", "/server_info", HERE | KEY | {"sec-fetch-site": "same-origin"}),
    (415, "POST", "/generate", HERE | KEY | {"content-length": "2"}),
    (415, "POST", "/generate", HERE | KEY | JSON | {"content-type": "text/plain"}),
    (415, "POST", "/generate", HERE | KEY | {"transfer-encoding": "chunked", "content-type": "multipart/form-data"}),
    (415, "GET", "/flush_cache", HERE | KEY | JSON | {"content-type": "application/x-www-form-urlencoded"}),
]


@pytest.mark.parametrize(("method", "path", "headers"), ALLOWED)
def test_these_are_let_in(method: str, path: str, headers: dict[str, str]) -> None:
    assert GUARD.refusal(method, path, headers) is None


@pytest.mark.parametrize(("status", "method", "path", "headers"), REFUSED)
def test_these_are_refused(status: int, method: str, path: str, headers: dict[str, str]) -> None:
    refusal = GUARD.refusal(method, path, headers)
    assert refusal is not None and refusal.status == status
    assert "t" * 32 not in repr(GUARD) and b"t" * 32 not in refusal.body


def test_any_name_will_do_at_an_address_that_other_machines_reach() -> None:
    guard = Guard("t" * 32, hosts_of("0.0.0.0"))
    assert guard.refusal("GET", "/server_info", {"host": "engine.example"} | KEY) is None
    assert guard.refusal("GET", "/server_info", {"host": "engine.example"}) is not None


def test_no_two_tokens_are_equal() -> None:
    assert new_token() != new_token() and len(new_token()) > 40


async def asked(app: GuardedApp, scope: dict[str, Any]) -> list[dict[str, Any]]:
    """What an application sends to one request."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("a request that is refused is not read")

    await app(scope, receive, send)
    return sent


async def reached(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "reached"})


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_an_asgi_application_hears_only_of_those_that_are_let_in(kind: str) -> None:
    app = GuardedApp(reached, GUARD)
    scope: dict[str, Any] = {"type": kind, "path": "/generate"} | ({"method": "POST"} if kind == "http" else {})
    right = [(name.encode(), value.encode()) for name, value in (HERE | KEY).items()]
    assert await asked(app, scope | {"headers": right}) == [{"type": "reached"}]
    first, *_ = await asked(app, scope | {"headers": right[:1]})
    assert first.get("status") == 401 if kind == "http" else first["type"] == "websocket.close"
    assert await asked(app, {"type": "lifespan"}) == [{"type": "reached"}]


async def test_an_engine_of_another_environment_has_its_token_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    with pytest.raises(KeyError):
        EngineGuard(reached)
    monkeypatch.setenv(TOKEN, "t" * 32)
    monkeypatch.setenv(ADDRESS, "127.0.0.1")
    scope = {"type": "http", "method": "GET", "path": "/server_info", "headers": [(b"host", b"localhost:1")]}
    assert (await asked(EngineGuard(reached), scope))[0]["status"] == 401


async def test_an_aiohttp_application_hears_only_of_those_that_are_let_in() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(await request.json())

    app = web.Application(middlewares=[guarded(GUARD)])
    app.router.add_post("/generate", handler)
    async with TestClient(TestServer(app)) as client:
        assert (await client.post("/generate", json={"a": 1}, headers=KEY)).status == 200
        answer = await client.post("/generate", json={"a": 1})
        assert answer.status == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
        assert (await answer.json())["error"]["code"] == "unauthorized"
        assert (await client.post("/nowhere", json={})).status == 401, "what there is, is not told either"

        async def endless() -> Any:
            while True:
                yield b"x" * 4096
                await asyncio.sleep(0.01)

        async with asyncio.timeout(10):  # the body is not waited for
            assert (await client.post("/generate", data=endless(), headers=JSON | {"content-length": "1000000"})).status == 401

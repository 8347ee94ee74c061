"""Every route of every server that only our own programs call, asked by strangers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from relax_server.engines.embedded.server import EngineServer
from relax_server.gateway.agent.gateway import AgentGateway
from relax_server.guard import Guard, hosts_of
from relax_server.roles.control import RunControlServer

from relax_sdk.control import read_control

TOKEN = "t" * 32
JSON = {"Content-Type": "application/json"}
Ask = Callable[[str, str, dict[str, str]], Any]
ENGINE = {
    ("POST", "/generate"),
    ("POST", "/abort_request"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("POST", "/release_memory_occupation"),
    ("POST", "/resume_memory_occupation"),
    ("POST", "/flush_cache"),
    ("GET", "/flush_cache"),
    ("GET", "/health_generate"),
    ("GET", "/server_info"),
    ("GET", "/get_server_info"),
    ("GET", "/model_info"),
    ("GET", "/get_model_info"),
}
CONTROL = {("GET", "/v1/engines"), ("POST", "/v1/engines"), ("GET", "/v1/engines/{id}"), ("DELETE", "/v1/engines/{id}")}
SESSION = "/v1/sessions/{id}"
GATEWAY = {
    ("POST", f"{SESSION}/openai/v1/chat/completions"),
    ("POST", f"{SESSION}/openai/v1/responses"),
    ("GET", SESSION),
    ("DELETE", SESSION),
    ("POST", f"{SESSION}/step"),
    ("POST", f"{SESSION}/reward"),
    ("POST", f"{SESSION}/finish"),
}


def table(app: web.Application) -> set[tuple[str, str]]:
    """The routes of an application, but for those that aiohttp adds."""
    return {(r.method, r.resource.canonical) for r in app.router.routes() if r.resource is not None and r.method != "HEAD"}


@asynccontextmanager
async def over_http(url: str) -> AsyncIterator[Ask]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as session:

        async def ask(method: str, path: str, headers: dict[str, str]) -> int:
            data = b"{}" if "Content-Type" in headers else None
            async with session.request(method, url + path.replace("{id}", "x"), headers=headers, data=data) as answer:
                return answer.status

        yield ask


@asynccontextmanager
async def engine(folder: Path) -> AsyncIterator[tuple[Ask, str, set[tuple[str, str]]]]:
    """The embedded engine without a model: nothing that is asked here may reach it."""
    server = object.__new__(EngineServer)
    server.guard = Guard(TOKEN, hosts_of("127.0.0.1"))
    app = server.app()
    async with TestServer(app) as there, over_http(str(there.make_url("/")).rstrip("/")) as ask:
        yield ask, TOKEN, table(app) - {("GET", "/health")}


@asynccontextmanager
async def control(folder: Path) -> AsyncIterator[tuple[Ask, str, set[tuple[str, str]]]]:
    server = RunControlServer(folder, cast(Any, SimpleNamespace(infos=[])), list)
    await server.start()
    try:
        assert server._runner is not None
        known = read_control(folder)
        async with over_http(known["url"]) as ask:
            yield ask, known["key"], table(server._runner.app)
    finally:
        await server.stop()


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[tuple[Ask, str, set[tuple[str, str]]]]:
    app = AgentGateway("true", cast(Any, None), cast(Any, None), cast(Any, None)).app()
    transport = httpx.ASGITransport(cast(Any, app))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

        async def ask(method: str, path: str, headers: dict[str, str]) -> int:
            content = b"{}" if "Content-Type" in headers else None
            answer = await client.request(method, path.replace("{id}", "s_1"), headers=headers, content=content)
            return answer.status_code

        routes = cast(Any, app)._app.routes
        yield ask, "rls_none", {(method, r.path) for r in routes for method in r.methods - {"HEAD"}}


Routes = set[tuple[str, str]]
Server = Callable[[Path], AbstractAsyncContextManager[tuple[Ask, str, Routes]]]
SERVERS: list[tuple[Server, Routes, int]] = [
    (engine, ENGINE, 401),
    (control, CONTROL, 401),
    (gateway, GATEWAY, 404),
]
"""Each with its routes and the answer without its token: at the gateway, keys are those of sessions, which are not told of."""


@pytest.mark.parametrize(("server", "routes", "unknown"), SERVERS, ids=["engine", "control", "gateway"])
async def test_a_stranger_is_refused_on_every_route(server: Server, routes: Routes, unknown: int, tmp_path: Path) -> None:
    async with server(tmp_path) as (ask, token, there):
        assert there == routes, "a new route belongs into the table above"
        right = {"Authorization": f"Bearer {token}"}
        for method, path in sorted(routes):
            body = JSON if method == "POST" else {}
            strangers = {
                "without a token": (body, unknown),
                "with another token": (body | {"Authorization": "Bearer " + "x" * 32}, unknown),
                "under another name (DNS rebinding)": (right | body | {"Host": "attacker.example"}, 400),
                "from a web page": (right | body | {"Origin": "http://attacker.example"}, 403),
                "from a web page of this server's own address": (right | body | {"Origin": "http://127.0.0.1"}, 403),
                "from a web page, by a link": (right | body | {"Sec-Fetch-Site": "cross-site"}, 403),
                "as a form": (right | {"Content-Type": "text/plain"}, 415),
            }
            for who, (headers, status) in strangers.items():
                assert await ask(method, path, headers) == status, f"{method} {path} {who}"

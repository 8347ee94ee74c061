"""Tokens of engines: given, kept, found, sent, and nowhere to be seen."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import pytest_asyncio
from aiohttp import web
from relax_server.engines.addresses import EngineAddress
from relax_server.engines.base import GenerateRequest
from relax_server.engines.foreign import GUARD, ForeignProcess, take_port
from relax_server.engines.http import HttpEngine
from relax_server.engines.kinds import connect_running
from relax_server.engines.settings import EngineSettings
from relax_server.engines.sglang.client import SglangEngine
from relax_server.engines.sglang.environment import INSIDE
from relax_server.engines.tokens import find_token, forget_tokens, keep_token, read_token, take_token
from relax_server.engines.venv import Venv
from relax_server.engines.vllm.client import VllmEngine
from relax_server.guard import TOKEN
from relax_server.roles.slot import EngineSlot

from relax_sdk.config import SamplingParams
from relax_sdk.errors import ConfigError, EngineDenied, EngineError

URL = "http://127.0.0.1:31999"
SECRET = "a-token-of-the-tests-0123456789"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RELAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(TOKEN, raising=False)
    return tmp_path / "cache"


def test_a_token_is_kept_for_this_user_and_found_by_address(cache: Path) -> None:
    kept = keep_token(URL, SECRET)
    assert kept.stat().st_mode & 0o777 == 0o600 and kept.parent.stat().st_mode & 0o777 == 0o700
    assert find_token(URL) == find_token("http://localhost:31999") == SECRET == read_token(kept)
    assert find_token("http://127.0.0.1:31998") == "" and find_token("http://10.0.0.7:31999") == ""
    forget_tokens()
    assert find_token(URL) == "" and not kept.exists()


def test_the_token_of_an_engine_that_has_ended_is_told_to_nobody_and_removed() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    kept = keep_token(URL, SECRET)
    kept.write_text(f"{SECRET}\n{ended.pid}\n")
    assert find_token(URL) == ""
    keep_token("http://127.0.0.1:31998", SECRET)
    assert not kept.exists()


def test_a_token_is_given_in_a_variable_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(SECRET + "\n")
    assert read_token(file) == SECRET and read_token(None) == ""
    with pytest.raises(ConfigError, match=TOKEN):
        take_token()
    monkeypatch.setenv(TOKEN, SECRET)
    assert find_token("http://10.0.0.7:1") == SECRET and take_token() == SECRET and TOKEN not in os.environ
    for wrong in ("", "short", "with a space in it all", "with\tcontrol-characters", "not-only-ascii-äöü-0123"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="16 to 512 visible ASCII") as raised:
            read_token(file)
        assert not wrong or wrong not in str(raised.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "none")


def test_it_is_in_no_representation() -> None:
    settings = EngineSettings(token=SECRET)
    slot = EngineSlot("e1", "embedded", None, URL, SECRET, token=SECRET)
    for value in (settings, slot, slot.reach, EngineAddress(URL, "vllm", SECRET)):
        assert SECRET not in repr(value) and SECRET not in str(value)
    assert EngineSettings().token != EngineSettings().token, "each engine has one of its own"


class Jealous:
    """A server that says with which token it was called."""

    def __init__(self) -> None:
        self.url = ""
        self.shown: list[tuple[str, str | None]] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.shown.append((request.path, request.headers.get("Authorization")))
        if request.headers.get("Authorization") != f"Bearer {SECRET}":
            return web.json_response({"error": {"message": "no"}}, status=401)
        return web.json_response({"success": True, "max_model_len": 100, "model_path": "x", "loads": []})


@pytest_asyncio.fixture
async def jealous() -> AsyncIterator[Jealous]:
    server, app = Jealous(), web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


REQUEST = GenerateRequest([1, 2], SamplingParams(max_new_tokens=2))


async def _stream(engine: HttpEngine) -> None:
    async for _ in engine.stream(REQUEST, 5):
        pass


CALLS: list[Callable[[HttpEngine], Awaitable[object]]] = [
    lambda engine: engine.generate(REQUEST, 5),
    _stream,
    lambda engine: engine.abort("a"),
    lambda engine: engine.pause("in_place"),
    lambda engine: engine.resume(),
    lambda engine: engine.flush_cache(),
    lambda engine: engine.server_info(),
    lambda engine: engine.model_info(),
    lambda engine: engine.health(),
    lambda engine: HttpEngine.update_weights(engine, "w", 1),
    lambda engine: HttpEngine.release_memory(engine),
    lambda engine: HttpEngine.resume_memory(engine),
]


@pytest.mark.parametrize("kind", [HttpEngine, SglangEngine, VllmEngine])
async def test_every_call_shows_the_token(jealous: Jealous, kind: type[HttpEngine]) -> None:
    engine = kind(jealous.url, token=SECRET)
    for call in CALLS:
        before = len(jealous.shown)
        try:
            await call(engine)
        except EngineDenied:
            raise
        except EngineError:
            pass  # its answers are not those of an engine
        assert len(jealous.shown) > before
    await engine.close()
    assert {shown for _, shown in jealous.shown} == {f"Bearer {SECRET}"}


async def test_an_engine_that_wants_another_token_is_told_from_one_that_is_away(jealous: Jealous) -> None:
    with pytest.raises(EngineDenied, match="--engine-token-file"):
        await connect_running(jealous.url, "another-token-0123456789", False)
    with pytest.raises(EngineDenied):
        await connect_running(jealous.url, "", False)
    keep_token(jealous.url, SECRET)
    engine = await connect_running(jealous.url, "", False)
    assert (await engine.model_info())["model_path"] == "x"
    await engine.close()


SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

guarded = sys.argv[2] == "guarded"
if guarded:
    from relax_guard import ADDRESS, TOKEN, Guard, hosts_of
    guard = Guard(os.environ[TOKEN], hosts_of(os.environ[ADDRESS]))

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        refusal = guard.refusal("GET", self.path, {k.lower(): v for k, v in self.headers.items()}) if guarded else None
        self.send_response(refusal.status if refusal else 200)
        self.end_headers()
        self.wfile.write(refusal.body if refusal else b"{}")

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Elsewhere(ForeignProcess):
    """A small server in the place of SGLang."""

    venv = Venv("Elsewhere", "elsewhere", "0")
    stages = {}

    async def run(self, *words: str) -> None:
        port = take_port("127.0.0.1", 0)
        command = [sys.executable, "-c", SERVER, str(port), *words]
        await self._serve(command, dict(os.environ), f"http://127.0.0.1:{port}", 30.0)


async def test_a_server_of_another_environment_is_used_only_if_it_refuses_strangers(tmp_path: Path) -> None:
    process = Elsewhere("model", tmp_path / "log")
    with pytest.raises(EngineError, match="answers without its token, so it was ended"):
        await process.run("open")
    assert not process.alive()
    await process.run("guarded")
    try:
        engine = HttpEngine(process.url, token=process.token)
        assert await engine.model_info() == {}
        await engine.close()
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert not [p for p in family if process.token in " ".join(p.cmdline())]
        assert process.token not in (tmp_path / "log").read_text()
    finally:
        await process.stop()


async def test_what_sglang_asks_of_itself_is_sent_with_the_token_and_nothing_else_is(
    jealous: Jealous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv(TOKEN, SECRET)
    monkeypatch.syspath_prepend(GUARD)
    spec = importlib.util.spec_from_file_location("inside_sglang", INSIDE / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    inside, middlewares = importlib.util.module_from_spec(spec), []
    spec.loader.exec_module(inside)
    server = SimpleNamespace(app=SimpleNamespace(add_middleware=middlewares.append))
    inside._guard(server)
    requests: Any = server.requests
    await asyncio.to_thread(requests.post, jealous.url + "/freeze_gc", timeout=5)
    await asyncio.to_thread(requests.get, jealous.url + "/get_transfer_engine_info", timeout=5)
    assert jealous.shown == [("/freeze_gc", f"Bearer {SECRET}"), ("/get_transfer_engine_info", None)]
    assert [middleware.__name__ for middleware in middlewares] == ["EngineGuard"]


@pytest.mark.parametrize("flags", [("--tp", "2", "--api-key", SECRET), (f"--admin-api-key={SECRET}",)])
async def test_a_key_on_a_command_line_is_refused(tmp_path: Path, flags: tuple[str, ...]) -> None:
    process = Elsewhere("model", tmp_path / "log", EngineSettings(flags=flags))
    with pytest.raises(ConfigError, match="--token-file") as raised:
        await process.run("guarded")
    assert SECRET not in str(raised.value) and not process.alive()

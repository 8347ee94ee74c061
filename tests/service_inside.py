"""A rollout service in this process, with a scripted engine: for tests that make its parts fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from relax_server.api.app import make_app
from relax_server.api.core import ServiceCore, folder_of
from relax_server.api.sessions import SessionHub
from relax_server.api.settings import ServiceConfig
from relax_server.models.processor import Processor
from relax_server.rollout import EnginePool
from scripted_engine import ScriptedEngine

HELLO = [{"role": "user", "content": "hello"}]


@dataclass
class InsideService:
    """A running service, and what it is made of."""

    core: ServiceCore
    hub: SessionHub
    engine: ScriptedEngine
    http: httpx.AsyncClient

    async def open(self, **body: Any) -> dict[str, Any]:
        """A new session."""
        answer = await self.http.post("/v1/sessions", json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()

    async def played(self, **body: Any) -> dict[str, Any]:
        """A new session with one model call."""
        session = await self.open(**body)
        answer = await self.http.post(f"/v1/sessions/{session['id']}/openai/v1/chat/completions", json={"messages": HELLO})
        assert answer.status_code == 200, answer.text
        return session

    async def finish(self, session: dict[str, Any]) -> httpx.Response:
        """The answer to `finish`, which must come."""
        async with asyncio.timeout(30):
            return await self.http.post(f"/v1/sessions/{session['id']}/finish")


@contextlib.asynccontextmanager
async def service_inside(
    processor: Processor, folder: Path, journal: str | None = None, **settings: Any
) -> AsyncIterator[InsideService]:
    """Start one and end it."""
    engine = ScriptedEngine(processor)
    config = ServiceConfig(folder=folder, journal=journal, **settings)
    folder_of(config)
    core = ServiceCore(config, processor, EnginePool([engine]))
    app = make_app(core)
    told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    said: asyncio.Queue[Any] = asyncio.Queue()
    living = asyncio.ensure_future(app.asgi({"type": "lifespan", "asgi": {"version": "3.0"}}, told.get, said.put))
    told.put_nowait({"type": "lifespan.startup"})
    assert (await said.get())["type"] == "lifespan.startup.complete"
    transport = httpx.ASGITransport(app.asgi, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as http:
        yield InsideService(core, app.sessions, engine, http)
    told.put_nowait({"type": "lifespan.shutdown"})
    assert (await said.get())["type"] == "lifespan.shutdown.complete"
    await living

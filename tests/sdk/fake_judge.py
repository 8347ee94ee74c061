"""A fake chat endpoint: answers what a script tells it, and keeps the requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class FakeJudge:
    """Answers request i with `script[i]` (the last one again when the script is over).

    A string is the judge's answer; a number an HTTP status, a tuple one and its `Retry-After`; a dictionary a JSON body; `hang`
    never answers.
    """

    def __init__(self, script: Sequence[Any]) -> None:
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.peers: list[tuple[str, int]] = []
        """Addresses that requests came from: one a connection."""
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
        assert request.transport is not None
        self.peers.append(request.transport.get_extra_info("peername"))
        item = self.script[min(len(self.requests), len(self.script)) - 1]
        if item == "hang":
            await asyncio.Event().wait()
        if isinstance(item, int):
            item = (item, 0)
        if isinstance(item, tuple):
            return web.Response(status=item[0], text=f"status {item[0]}", headers={"Retry-After": str(item[1])})
        if isinstance(item, str):
            item = {"choices": [{"message": {"role": "assistant", "content": item}, "finish_reason": "stop"}]}
        return web.json_response(item)


@asynccontextmanager
async def fake_judge(*script: Any) -> AsyncIterator[FakeJudge]:
    fake = FakeJudge(script)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", fake.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"  # type: ignore[union-attr]
    try:
        yield fake
    finally:
        await runner.cleanup()

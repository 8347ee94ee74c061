"""The client of OpenAI-compatible endpoints, beside a server that answers as it is told to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from relax_server.engines.openai import ChatClient

from relax_sdk import Endpoint, Message, Text
from relax_sdk.config import SamplingParams
from relax_sdk.errors import EngineError, EngineUnavailable
from relax_sdk.retrying import retrying

ASKED = [Message("user", (Text("say something"),))]


@asynccontextmanager
async def limited(*waits: str) -> AsyncIterator[tuple[ChatClient, list[int]]]:
    """A client of a server that refuses as many requests as are named, and asks to wait so long after each."""
    left, statuses = list(waits), []

    async def answer(request: web.Request) -> web.Response:
        if left:
            statuses.append(429)
            return web.json_response({"error": "too many requests"}, status=429, headers={"Retry-After": left.pop(0)})
        statuses.append(200)
        return web.json_response({"choices": [{"message": {"content": "something"}, "finish_reason": "stop"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = ChatClient(Endpoint(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "any"))
    try:
        yield client, statuses
    finally:
        await client.close()
        await runner.cleanup()


async def test_a_server_that_asks_to_wait_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr("relax_server.engines.openai.retrying", lambda *args, **more: retrying(*args, **more).copy(sleep=sleep))
    async with limited("7", "", "3") as (client, statuses):
        message = await client.ask(ASKED, (), SamplingParams(), timeout=30.0)
    assert message.text == "something" and statuses == [429, 429, 429, 200]
    assert waited[0] == 7.0 and waited[1] <= 1.0 and waited[2] == 3.0


async def test_a_wait_that_would_end_too_late_is_not_begun() -> None:
    async with limited("50") as (client, statuses):
        with pytest.raises(EngineUnavailable, match="answered 429"):
            await client.ask(ASKED, (), SamplingParams(), timeout=5.0)
    assert statuses == [429]


async def test_a_call_that_waits_opens_nothing_after_the_client_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with limited("1") as (client, statuses):

        async def meanwhile(seconds: float) -> None:
            await client.close()

        again = lambda *args, **more: retrying(*args, **more).copy(sleep=meanwhile)
        monkeypatch.setattr("relax_server.engines.openai.retrying", again)
        with pytest.raises(EngineError, match="after its client was closed"):
            await client.ask(ASKED, (), SamplingParams(), timeout=30.0)
    assert statuses == [429]

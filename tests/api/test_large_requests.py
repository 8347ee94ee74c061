"""Whatever one agent sends, the others are answered: work that grows with a request is bounded, and not the event loop's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import httpx
import pytest
from service_process import Service

SAID = {"role": "user", "content": "x"}
FUNCTION = {"type": "function", "function": {"name": "function", "parameters": {"type": "object", "properties": {}}}}
DEEP = json.loads("[" * 150 + "]" * 150)


def large(field: str) -> dict[str, Any]:
    """Bodies that grow in all ways, by what they are called."""
    part = {"type": "text" if field == "messages" else "input_text", "text": "ab"}
    return {
        "messages": {field: [SAID] * 100_000},
        "as many messages as are read": {field: [SAID] * 10_000},
        "text": {field: [SAID | {"content": "word " * 400_000}]},
        "text that nearly fits": {field: [SAID | {"content": "word " * 10_000}]},
        "escapes": {field: [SAID | {"content": "\n\u00e9" * 1_000_000}]},
        "parts": {field: [SAID | {"content": [part] * 9_000}]},
        "tools": {field: [SAID], "tools": [FUNCTION] * 900},
        "too many tools": {field: [SAID], "tools": [FUNCTION] * 50_000},
        "deep tools": {field: [SAID], "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": DEEP}}}]},
        "deep metadata": {field: [SAID], "metadata": DEEP},
        "deep message": {field: DEEP},
        "lists": {field: [[]] * 400_000},
    }


def holds(service: Service) -> dict[str, float]:
    """The histogram of what the loop's thread computed without a pause: how many times up to how many seconds."""
    rows = [line.rsplit(" ", 1) for line in httpx.get(f"{service.url}/metrics").text.splitlines()]
    name = "relax_loop_held_seconds_bucket"
    return {row[0].split('"')[1]: float(row[1]) for row in rows if row[0].startswith(name)}


@pytest.fixture
def watched(service: Service):
    """Nothing that a test does may hold the loop's thread for a quarter of a second of computing; 50 ms are the aim."""
    before = holds(service)
    yield
    after = holds(service)
    assert after["+Inf"] > before["+Inf"], "the loop is watched"
    long = {bound: (after["+Inf"] - after[bound]) - (before["+Inf"] - before[bound]) for bound in ("0.05", "0.1", "0.25")}
    assert long["0.25"] == 0, long


@pytest.mark.parametrize("path, field", [("chat/completions", "messages"), ("responses", "input")])
async def test_large_requests_are_refused_while_others_are_answered(service: Service, watched, path: str, field: str) -> None:
    session = service.open(sampling={"max_new_tokens": 1}, limits={"max_tokens": 1 << 24})
    other = service.open(sampling={"max_new_tokens": 1}, limits={"max_turns": 100_000})
    bodies, over = large(field), asyncio.Event()
    async with aiohttp.ClientSession() as http:

        async def honest() -> int:
            calls = 0
            while not over.is_set():
                async with http.post(
                    f"{other['base_url']}/chat/completions", json={"messages": [SAID]}, headers=key(other)
                ) as it:
                    assert it.status == 200, await it.text()
                calls += 1
            return calls

        answers = {}
        async with asyncio.TaskGroup() as tasks:
            calling = tasks.create_task(honest())
            for name, body in bodies.items():
                async with http.post(f"{session['base_url']}/{path}", data=json.dumps(body), headers=key(session)) as answer:
                    answers[name] = answer.status, (await answer.text())[:300]
            over.set()
        assert calling.result() > 0
    assert {name: told for name, told in answers.items() if told[0] not in (400, 413)} == {}


async def test_large_messages_of_a_socket_are_refused_while_others_are_answered(service: Service, watched) -> None:
    session = service.open(sampling={"max_new_tokens": 1}, limits={"max_tokens": 1 << 24})
    url = service.url.replace("http", "ws") + f"/v1/sessions/{session['id']}/ws"
    async with aiohttp.ClientSession() as http, http.ws_connect(url, headers=key(session), max_msg_size=0) as socket:
        for name, body in large("messages").items():
            await socket.send_str(json.dumps({"id": name, "op": "generate"} | body))
            told = json.loads(await socket.receive_bytes(timeout=60))
            assert told["error"]["message"], name
        await socket.send_str(json.dumps({"id": 1, "op": "generate", "messages": [SAID]}))
        assert json.loads(await socket.receive_bytes(timeout=60))["result"]["choices"]


async def test_a_long_conversation_that_is_sent_again_and_again_costs_the_loop_little(service: Service, watched) -> None:
    session = service.open(sampling={"max_new_tokens": 1}, limits={"max_turns": 100})
    messages = [SAID] * 250
    async with aiohttp.ClientSession() as http:
        for _ in range(20):
            body = json.dumps({"messages": messages, "logprobs": True})
            async with http.post(f"{session['base_url']}/chat/completions", data=body, headers=key(session)) as answer:
                told = await answer.json()
                assert answer.status == 200, told
            messages = [*messages, told["choices"][0]["message"], SAID]


def key(session: dict[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {session['key']}", "Content-Type": "application/json"}

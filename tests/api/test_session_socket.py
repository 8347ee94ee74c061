"""A session over one WebSocket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
import websockets
from reward_bodies import REFUSED
from service_process import Service
from websockets.asyncio.client import ClientConnection


def connect(service: Service, session: dict, key: str | None = None) -> Any:
    headers = {"Authorization": f"Bearer {key or session['key']}"}
    url = service.url.replace("http", "ws") + f"/v1/sessions/{session['id']}/ws"
    return websockets.connect(url, additional_headers=headers, max_size=None)


async def ask(socket: ClientConnection, **body: Any) -> dict[str, Any]:
    await socket.send(json.dumps(body))
    return json.loads(await asyncio.wait_for(socket.recv(), 30))


async def test_an_episode(service: Service) -> None:
    session = service.open(env="tone-v0", sampling={"max_new_tokens": 1})
    async with connect(service, session) as socket:
        answer = await ask(socket, id=1, op="generate", messages=session["observation"])
        assert answer["id"] == 1
        message = answer["result"]["choices"][0]["message"]
        step = (await ask(socket, id=2, op="step", action=message))["result"]
        assert step["terminated"] is True
        assert (await ask(socket, id=3, op="reward", value=0.5))["result"] == {"name": "reward", "value": 0.5}
        done = (await ask(socket, id=4, op="finish"))["result"]
    assert done["status"] == "completed" and done["reward"] == step["reward"] + 0.5


async def test_requests_are_answered_as_they_are_done(service: Service) -> None:
    session = service.open(sampling={"max_new_tokens": 3}, limits={"max_turns": 100})
    async with connect(service, session) as socket:
        for i in range(20):
            await socket.send(json.dumps({"id": i, "op": "generate", "messages": [{"role": "user", "content": f"q{i}"}]}))
        ids = [json.loads(await asyncio.wait_for(socket.recv(), 30))["id"] for _ in range(20)]
    assert sorted(ids) == list(range(20))


async def test_errors_leave_the_socket_open(service: Service) -> None:
    session = service.open(sampling={"max_new_tokens": 1})
    async with connect(service, session) as socket:
        await socket.send("{")
        assert json.loads(await socket.recv())["error"]["code"] == "invalid_json"
        for body, says in (
            ({"op": "fly"}, "allowed: open"),
            ({"op": "generate"}, "messages"),
            ({"op": "step", "action": 3}, "action: Input should be a valid dictionary"),
            ({"op": "step", "acton": {}}, "action: Field required"),
            ({"op": "finish"}, "no model call yet"),
        ):
            answer = await ask(socket, id="a", **body)
            assert answer["id"] == "a" and says in answer["error"]["message"], answer
        answer = await ask(socket, op="generate", messages=[{"role": "user", "content": "x"}])
        assert "result" in answer


async def test_a_reward_is_read_the_same_over_the_route_and_the_socket(service: Service) -> None:
    session = service.open(sampling={"max_new_tokens": 1})
    async with connect(service, session) as socket, httpx.AsyncClient(base_url=service.url, timeout=30) as http:
        for body, says in REFUSED:
            posted = await http.post(f"/v1/sessions/{session['id']}/reward", json=body)
            sent = await ask(socket, op="reward", **body)
            assert posted.status_code == 400 and posted.json()["error"] == sent["error"], body
            assert sent["error"]["message"] == says


def fresh(service: Service, key: str = "") -> Any:
    url = service.url.replace("http", "ws") + "/v1/sessions/ws"
    return websockets.connect(url, additional_headers={"Authorization": f"Bearer {key}"} if key else {}, max_size=None)


async def test_sessions_opened_over_the_socket_one_after_the_other(service: Service) -> None:
    async with fresh(service) as socket:
        none = await ask(socket, op="finish")
        assert "op = open" in none["error"]["message"]
        for task in range(2):
            sampling = {"max_new_tokens": 1}
            session = (await ask(socket, id=0, op="open", env="tone-v0", task_index=task, sampling=sampling))["result"]
            assert session["base_url"] == f"{service.url}/v1/sessions/{session['id']}/openai/v1"
            again = await ask(socket, op="open", env="tone-v0")
            assert again["error"]["code"] == "session_open"
            answer = await ask(socket, op="generate", messages=session["observation"])
            await ask(socket, op="step", action=answer["result"]["choices"][0]["message"])
            done = (await ask(socket, op="finish"))["result"]
            assert done["status"] == "completed" and done["trajectory_id"] == session["trajectory_id"]


async def test_what_cannot_be_opened_says_why(service: Service) -> None:
    async with fresh(service) as socket:
        for body, says in (
            ({"env": "tone-v0", "task_index": -1}, "task_index"),
            ({"env": "nothing-v9"}, "nothing-v9"),
            ({"environment": "tone-v0"}, "environment"),
        ):
            answer = await ask(socket, id=7, op="open", **body)
            assert answer["id"] == 7 and says in answer["error"]["message"], answer
        assert "result" in await ask(socket, op="open")
    session = service.open()
    async with connect(service, session) as socket:
        assert "/v1/sessions/ws" in (await ask(socket, op="open"))["error"]["message"]


async def test_a_session_outlives_its_socket(service: Service) -> None:
    async with fresh(service) as socket:
        session = (await ask(socket, op="open", sampling={"max_new_tokens": 1}))["result"]
    async with connect(service, session) as socket:
        answer = await ask(socket, op="generate", messages=[{"role": "user", "content": "x"}])
        assert "result" in answer


async def test_opening_takes_a_key(locked: Service) -> None:
    with pytest.raises(websockets.InvalidStatus):
        async with fresh(locked, key="no"):
            pass


async def test_a_foreign_key_is_refused(locked: Service) -> None:
    with locked.client() as client:
        session = client.post("/v1/sessions", json={}).json()
    with pytest.raises(websockets.InvalidStatus):
        async with connect(locked, session, key="no"):
            pass


def test_metrics(service: Service) -> None:
    text = httpx.get(f"{service.url}/metrics", timeout=30).text
    for name in ("relax_model_calls_total", "relax_sessions_open", "relax_engine_up", "relax_model_call_seconds_bucket"):
        assert f"\n{name}" in text, name

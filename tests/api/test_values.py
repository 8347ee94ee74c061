"""Requests with values that cannot be stored are refused with the field's name, and lists survive what is stored."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from relax_server.api.schemas import FREE_BYTES
from relax_server.gateway.played import MOST_REWARDS
from relax_server.models.processor import Processor
from service_inside import InsideService, service_inside
from sqlalchemy import text

import relax_sdk as relax
from relax_sdk import registry

DEEP = 900


@pytest.fixture(params=["sqlite", "postgres"])
async def inside(request: pytest.FixtureRequest, processor: Processor, tmp_path: Path) -> AsyncIterator[InsideService]:
    journal = None if request.param == "sqlite" else request.getfixturevalue("postgres").make()
    async with service_inside(processor, tmp_path, journal) as it:
        yield it


def raw(body: dict[str, Any]) -> dict[str, Any]:
    """A body as JSON that orjson and other careful writers would not write."""
    return {"content": json.dumps(body), "headers": {"Content-Type": "application/json"}}


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


BAD = [
    ("/v1/sessions", {"metadata": {"note": "\ud800"}}, "metadata.note"),
    ("/v1/sessions", {"metadata": {"\ud800": 1}}, "metadata.\ufffd"),
    ("/v1/sessions", {"metadata": {"n": 2**64}}, "metadata.n"),
    ("/v1/sessions", {"metadata": {"n": [1, -(2**70)]}}, "metadata.n.1"),
    ("/v1/sessions", {"metadata": {"x": float("nan")}}, "metadata.x"),
    ("/v1/sessions", {"metadata": {"deep": nested(DEEP)}}, None),
    ("/v1/sessions", {"metadata": {"big": "x" * FREE_BYTES}}, "metadata"),
    ("/v1/sessions", {"\ud800": 1}, "\ufffd"),
    ("/v1/sessions", {"env": "a\0b"}, "env"),
    ("/v1/sessions", {"split": "a\0b"}, "split"),
    ("/v1/sessions", {"sampling": {"stop": ["\udc00"]}}, "sampling.stop.0"),
    ("/v1/rollouts", {"env": "tone-v0", "n": 1, "sampling": {"stop": ["\ud800"]}}, "sampling.stop.0"),
    ("/v1/rollouts", {"env": "tone-v0", "n": 1, "sampling": {"stop_token_ids": [2**70]}}, "sampling.stop_token_ids.0"),
    ("/v1/rollouts", {"env": "tone-v0", "n": 1, "sampling": {"stop_token_ids": [2**40]}}, "sampling.stop_token_ids.0"),
    ("/v1/rollouts", {"env": "tone-v0", "n": 1, "sampling": {"stop_token_ids": [-1]}}, "sampling.stop_token_ids.0"),
    ("/v1/sessions", {"limits": {"episode_timeout": 5e-324}}, "limits.episode_timeout"),
    ("/v1/rollouts", {"env": "tone-v0", "n": 1, "limits": {"turn_timeout": 1e-9}}, "limits.turn_timeout"),
    ("/v1/rollouts", {"env": "\ud800"}, "env"),
    ("/v1/runs", {"env": "tone-v0", "config": {"model": "\ud800"}}, "config.model"),
    ("/v1/runs", {"env": "tone-v0", "config": {"learning_rate": float("inf")}}, "config.learning_rate"),
]


async def test_a_value_that_cannot_be_stored_is_refused_with_its_field_and_nothing_is_stored(inside: InsideService) -> None:
    for path, body, param in BAD:
        answer = await inside.http.post(path, **raw(body))
        assert answer.status_code == 400, (body, answer.text)
        error = answer.json()["error"]
        assert param is None or (error["param"] == param and param in error["message"]), error
    for path in ("/v1/sessions", "/v1/rollouts", "/v1/runs"):
        assert (await inside.http.get(path)).json() == {path.rsplit("/", 1)[1]: []}


async def test_ids_that_cannot_be_stored_are_refused_on_every_database(inside: InsideService) -> None:
    for path in ("/v1/rollouts/%00", "/v1/rollouts/%00/events", "/v1/trajectories/a%00b", "/v1/runs/%00", "/v1/envs/a%00b"):
        answer = await inside.http.get(path)
        assert answer.status_code in (400, 404), answer.text
    assert (await inside.http.delete("/v1/rollouts/%00")).status_code in (400, 404)
    assert (await inside.http.get("/v1/sessions/%00")).status_code == 404


async def test_rewards_from_outside_stay_few_and_finite(inside: InsideService) -> None:
    session = await inside.played()
    at = f"/v1/sessions/{session['id']}/reward"
    for body, param in (({"name": "\ud800", "value": 1.0}, "name"), ({"name": "a", "value": float("nan")}, "value")):
        answer = await inside.http.post(at, **raw(body))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await inside.http.post(at, json={"name": "a", "value": 1.7e308})).status_code == 200
    refused = await inside.http.post(at, json={"name": "b", "value": 1.7e308})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "value")
    codes = [(await inside.http.post(at, json={"name": f"r{i}", "value": 1.0})).status_code for i in range(MOST_REWARDS)]
    assert codes == [200] * (MOST_REWARDS - 1) + [400]
    assert (await inside.finish(session)).status_code == 200


async def test_tool_calls_and_tools_that_cannot_be_stored(inside: InsideService) -> None:
    session = await inside.open()
    at = f"/v1/sessions/{session['id']}/openai/v1/chat/completions"
    deep = '{"x": ' + "[" * 200 + "]" * 200 + "}"
    for arguments in (r'{"x": "\ud800"}', '{"x": 99999999999999999999}', deep):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ]
        answer = await inside.http.post(at, json={"messages": messages})
        assert answer.status_code == 200, answer.text
    tool = {"type": "function", "function": {"name": "f", "parameters": {"deep": nested(DEEP)}}}
    for more in ({"tools": [tool]}, {"response_format": nested(DEEP)}, {"tool_choice": nested(DEEP)}):
        answer = await inside.http.post(at, **raw({"messages": [{"role": "user", "content": "hello"}]} | more))
        assert answer.status_code == 400, answer.text
    assert (await inside.finish(session)).status_code == 200


async def test_lists_survive_what_older_versions_have_stored(inside: InsideService) -> None:
    request = '{"env": "tone-v0", "sampling": {"stop": ["\\ud800"], "stop_token_ids": [' + "9" * 40 + '], "top_p": 1e400}}'
    row = dict(id="r_old", key="local", request=request, counts='{"groups": 1}', state="completed", at=time.time())
    insert = "INSERT INTO rollouts (id, key, request, counts, state, error, created_at, ended_at)"
    with inside.core.journal.writing("add a row") as connection:
        connection.execute(text(f"{insert} VALUES (:id, :key, :request, :counts, :state, NULL, :at, :at)"), row)
    for path in ("/v1/rollouts", "/v1/rollouts/r_old"):
        answer = await inside.http.get(path)
        assert answer.status_code == 200, answer.text
        told = answer.json()["rollouts"][0] if path == "/v1/rollouts" else answer.json()
        assert told["request"]["sampling"] == {"stop": ["\ufffd"], "stop_token_ids": ["9" * 40], "top_p": None}


# --------------------------------------------------------------------------------------------------------- environments


class Strange(relax.Env):
    """Puts into `info` what nobody can store or send."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        loop: list[Any] = []
        loop.append(loop)
        keys = {(1, 2): "tuple", b"bytes": 1, 3: 4, "\ud800": "\udc00"}
        return "say", {"bytes": b"\xff", "deep": nested(2000), "loop": loop, "big": 2**80, "set": {1}, "keys": keys, "fine": 1}

    def step(self, action: Any) -> Any:
        return None, 1.0, True, False, self.reset()[1]


class Lying(relax.Env):
    """Fails with words that are no text."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return "say", {}

    def step(self, action: Any) -> Any:
        raise ValueError("\ud800 at \0")


class Unsayable(relax.Env):
    """Shows a tool call that has no form as JSON."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        call = relax.ToolCall("c", "f", {"x": object()})
        return [relax.Message("user", (relax.Text("say"),)), relax.AssistantMessage(tool_calls=(call,)), "and?"], {}

    def step(self, action: Any) -> Any:
        return None, 1.0, True, False, {}


@pytest.fixture(autouse=True)
def environments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, env in (("strange-v0", Strange), ("lying-v0", Lying), ("unsayable-v0", Unsayable)):
        relax.register(name, env, tasks=[{}])
    yield
    for name in ("strange-v0", "lying-v0", "unsayable-v0"):
        registry._specs.pop(name, None)


async def test_an_info_of_any_kind_is_told_and_its_plain_part_stored(inside: InsideService) -> None:
    session = await inside.played(env="strange-v0")
    assert session["info"]["fine"] == 1 and session["info"]["keys"]["3"] == 4
    step = await inside.http.post(f"/v1/sessions/{session['id']}/step", json={"action": {"content": "x"}})
    assert step.status_code == 200 and step.json()["info"]["fine"] == 1
    assert (await inside.finish(session)).status_code == 200
    kept = (await inside.http.get(f"/v1/trajectories/{session['trajectory_id']}")).json()["info"]
    assert kept["fine"] == 1 and kept["keys"] == {"\ufffd": "\ufffd"} and "bytes" not in kept


async def test_an_error_in_words_that_are_no_text_is_stored_and_told(inside: InsideService) -> None:
    session = await inside.played(env="lying-v0")
    step = await inside.http.post(f"/v1/sessions/{session['id']}/step", json={"action": {"content": "x"}})
    assert step.status_code == 502 and "\ufffd at" in step.json()["error"]["message"]
    done = await inside.finish(session)
    assert done.status_code == 200 and done.json()["status"] == "failed" and "\ufffd at" in done.json()["error"]
    rollout = (await inside.http.post("/v1/rollouts", json={"env": "lying-v0", "n": 1, "max_retries": 0})).json()
    while rollout["ended_at"] is None:
        rollout = (await inside.http.get(f"/v1/rollouts/{rollout['id']}")).json()
        await asyncio.sleep(0.05)
    assert (rollout["state"], rollout["counts"]["unusable"]) == ("completed", 1)


async def test_a_tool_call_that_has_no_form_as_json_is_the_environments_error(inside: InsideService) -> None:
    answer = await inside.http.post("/v1/sessions", json={"env": "unsayable-v0"})
    assert answer.status_code == 502 and "x is of type object" in answer.json()["error"]["message"]
    async with asyncio.timeout(30):
        while inside.hub._open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

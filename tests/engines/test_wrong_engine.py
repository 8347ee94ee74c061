"""An engine that answers wrongly, slowly or not at all: every answer that cannot be right is refused and says why."""

import asyncio
import copy
from typing import Any

import pytest
from aiohttp import web
from relax_server.engines.addresses import EngineAddress
from relax_server.engines.base import GenerateRequest
from relax_server.engines.http import HttpEngine
from relax_server.engines.kinds import connect
from relax_server.models.catalog import resolve_model

from relax_sdk import SamplingParams
from relax_sdk.errors import EngineAborted, EngineError, EngineUnavailable

REQUEST = GenerateRequest([5, 6, 7], SamplingParams(max_new_tokens=4))
RIGHT: dict[str, Any] = {
    "output_ids": [8, 9],
    "prompt_token_ids": [5, 6, 7],
    "meta_info": {
        "output_token_logprobs": [[-1.0, 8, None], [-2.0, 9, None]],
        "finish_reason": {"type": "stop"},
        "weight_version": "3",
    },
}


class WrongEngine:
    """A server that gives one answer to everything: a JSON body, raw bytes, or whatever a handler does."""

    def __init__(self) -> None:
        self.answer: Any = RIGHT
        self.status = 200
        self.cut = False
        self.hang = False
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.hang:
            await asyncio.Event().wait()  # until the client is gone or the server ends
        if self.cut:
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b'{"output_ids": [')
            assert request.transport is not None
            request.transport.close()
            return response
        if isinstance(self.answer, bytes):
            return web.Response(body=self.answer, status=self.status)
        return web.json_response(self.answer, status=self.status)


@pytest.fixture
async def server():
    wrong, app = WrongEngine(), web.Application()
    app.router.add_route("*", "/{path:.*}", wrong.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    wrong.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield wrong
    await runner.cleanup()


@pytest.fixture
async def engine(server):
    client = HttpEngine(server.url)
    yield client
    await client.close()


def changed(**values: Any) -> dict[str, Any]:
    """The right answer with other fields; `meta_…` goes into `meta_info`, and None removes the field."""
    answer = copy.deepcopy(RIGHT)
    for name, value in values.items():
        part, key = (answer["meta_info"], name.removeprefix("meta_")) if name.startswith("meta_") else (answer, name)
        part.pop(key)
        if value is not None:
            part[key] = value
    return answer


async def test_the_right_answer_is_taken(engine):
    (answer,) = await engine.generate(REQUEST, 5)
    assert (answer.response_ids, answer.logprobs, answer.weight_versions[0].version) == ([8, 9], [-1.0, -2.0], 3)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (changed(meta_output_token_logprobs=[[-1.0, 8, None]]), "1 logprobs that do not belong to its 2 tokens"),
        (changed(meta_output_token_logprobs=[[-1.0, 8], [-1.0, 4]]), "2 logprobs that do not belong to its 2 tokens"),
        (changed(meta_output_token_logprobs=[[None, 8], [-1.0, 9]]), "1 of 2 logprobs are not finite negative numbers"),
        (changed(meta_output_token_logprobs=[[0.7, 8], [-1.0, 9]]), "such as 0.7"),
        (changed(meta_output_token_logprobs=[[], []]), "not of the form that SGLang has"),
        (changed(meta_output_token_logprobs=None), "'output_token_logprobs' is missing"),
        (changed(output_ids=None), "'output_ids' is missing"),
        (changed(output_ids="A"), "not of the form that SGLang has"),
        (changed(output_ids=[8, "9"], meta_output_token_logprobs=[[-1, 8], [-1, "9"]]), "not of the form that SGLang has"),
        (changed(prompt_token_ids=[5, 6]), "2 prompt tokens where 3 were sent"),
        (changed(meta_finish_reason="stop"), "not of the form that SGLang has"),
        (changed(meta_weight_version="default"), "is not a number"),
        (changed(meta_weight_version=None), "is not a number"),
        (RIGHT | {"meta_info": RIGHT["meta_info"] | {"weight_versions": [dict(version=1, start=1, end=2)]}}, "do not cover"),
        (RIGHT | {"meta_info": None}, "not of the form that SGLang has"),
        ([RIGHT, RIGHT], "2 answers to a request with n = 1"),
        ("yes", "not of the form that SGLang has"),
        (b"<html>", "not JSON"),
        (b"", "not JSON"),
    ],
)
async def test_answers_that_cannot_be_right_are_refused(server, engine, answer, why):
    server.answer = answer
    with pytest.raises(EngineError, match="cannot be right") as caught:
        await engine.generate(REQUEST, 5)
    assert why in str(caught.value) and server.url in str(caught.value)
    assert not isinstance(caught.value, (EngineUnavailable, EngineAborted))  # asking another engine is of no use


@pytest.mark.parametrize(("status", "kind"), [(500, EngineError), (503, EngineUnavailable), (502, EngineUnavailable)])
async def test_refusals_carry_the_status_and_the_reason(server, engine, status, kind):
    server.status, server.answer = status, {"error": {"message": "no memory left"}}
    with pytest.raises(kind, match=f"answered {status}: .*no memory left"):
        await engine.generate(REQUEST, 5)


async def test_a_connection_that_is_cut_is_an_engine_that_is_gone(server, engine):
    server.cut = True
    with pytest.raises(EngineUnavailable):
        await engine.generate(REQUEST, 5)


async def test_an_engine_that_hangs_is_given_up(server, engine):
    server.hang = True
    with pytest.raises(EngineUnavailable, match=r"did not answer within 0\.2 s"):
        await engine.generate(REQUEST, 0.2)
    assert not await engine.health(0.2)


async def test_weights_that_were_not_loaded_are_an_error(server, engine):
    server.answer = {"success": False, "message": "no such file"}
    with pytest.raises(EngineError, match=r"did not load the weights in /nowhere.*no such file"):
        await engine.update_weights("/nowhere", 4)


SEEDED = GenerateRequest([5, 6, 7], SamplingParams(max_new_tokens=4, sampling_seed=3))
GREEDY = GenerateRequest([5, 6, 7], SamplingParams(max_new_tokens=4, temperature=0.0, sampling_seed=3))


async def test_an_sglang_server_that_ignores_seeds_is_named_once_with_what_to_set(server, tmp_path):
    said: list[str] = []
    engine = connect(EngineAddress(server.url, "sglang"), tmp_path, resolve_model("relax/tiny-llama"), said.append)
    try:
        for request in (REQUEST, GREEDY):  # no seed, or nothing to draw
            assert not (await engine.generate(request, 5.0))[0].seeded
        assert said == []
        for _ in range(2):
            assert not (await engine.generate(SEEDED, 5.0))[0].seeded
        (text,) = said
        assert text.startswith(server.url) and "--enable-deterministic-inference" in text
    finally:
        await engine.close()


@pytest.mark.parametrize(
    "setting", [{"enable_deterministic_inference": True}, {"extra_metric_labels": {"sampling_seeds": "x"}}]
)
async def test_nothing_is_said_of_an_sglang_server_that_takes_seeds(server, tmp_path, setting):
    server.answer = RIGHT | setting
    said: list[str] = []
    engine = connect(EngineAddress(server.url, "sglang"), tmp_path, resolve_model("relax/tiny-llama"), said.append)
    try:
        assert (await engine.generate(SEEDED, 5.0))[0].seeded
    finally:
        await engine.close()
    assert said == []

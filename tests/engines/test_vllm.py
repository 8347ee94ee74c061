"""A real vLLM server: its environment, its process, and what becomes of both when something is missing or dies."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from engine_reference import Reference
from relax_server.engines.base import GenerateRequest, Generation, MediaItem
from relax_server.engines.foreign import take_port
from relax_server.engines.settings import EngineSettings
from relax_server.engines.vllm.client import Ask, Leg, VllmEngine
from relax_server.engines.vllm.environment import VENV, look
from relax_server.engines.vllm.inside.relax_gate import RID, VERSION, Gate
from relax_server.engines.vllm.process import VllmProcess
from relax_server.models.catalog import resolve_model

import relax_sdk
from relax_sdk import Image
from relax_sdk.config import SamplingParams
from relax_sdk.errors import ConfigError, EngineError, EngineUnavailable
from relax_sdk.trajectory import VersionSpan

START_SECONDS = 500.0
MODEL = "relax/tiny-qwen3"


@pytest.fixture
def installed() -> None:
    try:
        VENV.find()
    except ConfigError as error:
        pytest.skip(str(error))


def test_what_is_missing_is_said_with_the_command_that_brings_it(tmp_path, monkeypatch):
    monkeypatch.delenv(VENV.variable, raising=False)
    monkeypatch.setenv("RELAX_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(relax_sdk, "__file__", str(tmp_path / "relax_sdk" / "__init__.py"))
    with pytest.raises(ConfigError, match=r"vLLM is not.*relax engine vllm --install.*make \.venv-vllm.*RELAX_VLLM_PYTHON"):
        VENV.find()
    monkeypatch.setenv(VENV.variable, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"nowhere \(from \$RELAX_VLLM_PYTHON\)"):
        VENV.find()


async def test_an_environment_without_vllm_is_refused():
    with pytest.raises(ConfigError, match=r"has no vLLM; .*--install"):
        await look(Path(sys.executable))


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        ("relax/tiny-omni", {}, r"takes media.*engine='embedded'"),
        (MODEL, {"return_routed_experts": True}, "routed experts"),
    ],
)
async def test_what_it_cannot_serve_is_refused_before_it_starts(tmp_path, model, settings, says):
    with pytest.raises(ConfigError, match=says):
        await VllmProcess(model, tmp_path / "log", EngineSettings(**settings)).start(START_SECONDS)


async def test_what_it_cannot_answer_is_refused_before_it_is_sent():
    engine = VllmEngine("http://127.0.0.1:9")
    image = Image.from_array(np.zeros((4, 4, 3), np.uint8))
    for request, says in (
        (GenerateRequest([1], SamplingParams(), (MediaItem(image.ref, "x.png"),)), "1 media"),
        (GenerateRequest([1], SamplingParams(), return_routed_experts=True), "routed experts"),
        (GenerateRequest([1], SamplingParams(temperature=0.001)), "0.01 and more"),
    ):
        with pytest.raises(EngineError, match=says):
            await engine.generate(request, 5)


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .*in use"):
            take_port("127.0.0.1", port)
    assert take_port("127.0.0.1", port) == port
    assert take_port("127.0.0.1", 0) > 0


def test_legs_of_an_answer_are_put_together():
    ask = Ask(GenerateRequest([7, 8], SamplingParams(max_new_tokens=9), n=4), until=0.0)
    legs = [Leg([1, 2], [-1.0, -2.0], 0, "abort", 3), Leg([], [], 1, "abort"), Leg([3], [-3.0], 1, "abort")]
    rest = ask.rest(legs)
    assert (rest.input_ids, rest.sampling.max_new_tokens, rest.n) == ([7, 8, 1, 2, 3], 6, 1)
    whole = ask.generation([*legs, Leg([4], [-4.0], 1, "stop"), Leg([5], [-5.0], 2, "stop")])
    assert whole.response_ids == [1, 2, 3, 4, 5] and whole.logprobs == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert whole.weight_versions == [VersionSpan(0, 0, 2), VersionSpan(1, 2, 4), VersionSpan(2, 4, 5)]
    assert whole.prompt_ids == [7, 8] and whole.finish_reason == "stop" and whole.cached_tokens == 3


def scope(rid: str) -> dict:
    headers = [(RID, rid.encode())]
    return {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "asgi": {"version": "3.0"}}


async def wait_forever() -> dict:
    await asyncio.Event().wait()
    raise AssertionError


async def test_an_answer_that_nobody_reads_holds_nothing_up():
    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"all of it"})

    async def read(message):
        await reading.wait()
        got.append(message)

    gate, reading, got = Gate(answer), asyncio.Event(), []
    asking = asyncio.create_task(gate(scope("slow"), wait_forever, read))
    await asyncio.wait({asking}, timeout=0.05)
    assert not asking.done() and not gate._running and gate._idle.is_set()
    reading.set()
    await asyncio.wait_for(asking, 5)
    assert got[0]["headers"] == [(VERSION, b"0")] and got[1]["body"] == b"all of it"


async def test_an_abort_ends_one_request_before_and_behind_the_gate():
    async def answer(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass

    async def read(message):
        got.append(message)

    gate, got = Gate(answer), []
    behind = asyncio.create_task(gate(scope("a"), wait_forever, read))
    await asyncio.wait({behind}, timeout=0.05)
    gate._open.clear()
    before = asyncio.create_task(gate(scope("b"), wait_forever, read))
    await asyncio.wait({before}, timeout=0.05)
    assert (len(gate._running), len(gate._waiting)) == (1, 1)
    gate._stop("c")
    assert not (await asyncio.wait({before, behind}, timeout=0.05))[0]
    for rid in ("a", "b"):
        gate._stop(rid)
    await asyncio.wait_for(asyncio.gather(before, behind), 5)
    assert [message["status"] for message in got if "status" in message] == [499, 499]


@pytest.mark.timeout(900)
async def test_a_model_is_served_and_updated_often_and_a_lost_server_is_noticed(installed, tmp_path):
    stages: list[str] = []
    references = [Reference(resolve_model(MODEL, seed)) for seed in (0, 1)]
    process = VllmProcess(
        MODEL, tmp_path / "log", EngineSettings(max_total_tokens=8192, weight_version=2), progress=stages.append
    )
    await process.start(START_SECONDS)
    engine = VllmEngine(process.url, token=process.token)
    try:
        with pytest.raises(EngineError, match="running already"):
            await process.start(START_SECONDS)
        assert stages[0] == "looking for vLLM" and stages[-1] == "ready" and len(stages) > 2

        # Six updates while answers of many lengths are under way: every token is of the version that it names.
        def check(generation: Generation) -> None:
            for span in generation.weight_versions:
                expected = references[span.version % 2].logprobs(generation.prompt_ids, generation.response_ids)
                assert abs(expected - generation.logprobs)[span.start : span.end].max() <= 1e-4

        def asked(i: int, tokens: int, n: int = 1) -> GenerateRequest:
            return GenerateRequest([20, 30, 40 + i], SamplingParams(max_new_tokens=tokens, ignore_eos=True), n=n)

        requests = [asked(i, 40 + 29 * (i % 8), 1 + i % 3) for i in range(24)]
        answers = [asyncio.ensure_future(engine.generate(request, 120)) for request in requests]
        version = 2
        async for part in engine.stream(asked(99, 400), 120):
            if len(part.response_ids) >= 50 * (version - 1) and version < 8:
                version += 1
                await engine.update_weights(str(references[version % 2].processor.path), version)
        check(part)
        versions = [span.version for span in part.weight_versions]  # one that was replaced at once has no token
        assert len(part.response_ids) == 400 and versions == sorted(set(versions)) and versions[0] == 2 and len(versions) > 2
        for request, generations in zip(requests, await asyncio.gather(*answers), strict=True):
            assert [len(g.response_ids) for g in generations] == [request.sampling.max_new_tokens] * request.n
            for generation in generations:
                check(generation)
        assert (await engine.model_info())["weight_version"] == "8"
        server = next(p for p in psutil.Process(process.pid).children() if "api_server" in " ".join(p.cmdline()))
        family = server.children(recursive=True)
        server.kill()
        assert await asyncio.wait_for(process.wait(), 30) != 0
        assert not process.alive() and not await engine.health()
        assert not psutil.wait_procs(family, timeout=20)[1]
    finally:
        await engine.close()
        await process.stop()


@pytest.mark.timeout(600)
async def test_a_start_that_fails_shows_the_log_and_leaves_nothing(installed, tmp_path):
    process = VllmProcess(MODEL, tmp_path / "log", EngineSettings(flags=("--no-such-flag",)))
    with pytest.raises(EngineUnavailable, match=r"(?s)exit code 2.*no-such-flag"):
        await process.start(START_SECONDS)
    assert not process.alive()
    late = VllmProcess(MODEL, tmp_path / "late")
    with pytest.raises(EngineUnavailable, match="not ready within"):
        await late.start(1.0)
    assert not late.alive() and late.pid is not None and not psutil.pid_exists(late.pid)


@pytest.mark.timeout(1200)
def test_the_command_starts_a_lost_engine_again_and_ends_when_told(installed, tmp_path):
    command = [sys.executable, "-m", "relax_sdk.cli", "engine", "vllm", "--port", "0", "--log", str(tmp_path / "log")]
    running = subprocess.Popen([*command, "--max-total-tokens", "8192"], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    try:
        until(running, r"ready at http://\S+;")
        children = psutil.Process(running.pid).children(recursive=True)
        next(p for p in children if "api_server" in " ".join(p.cmdline())).kill()
        said = until(running, r"ready at http://\S+;")
        assert "it ended with exit code" in said and "starting it again" in said
        children = psutil.Process(running.pid).children(recursive=True)
        running.terminate()
        assert "ended" in running.communicate(timeout=60)[0] and running.returncode == 0
        assert not psutil.wait_procs(children, timeout=20)[1]
    finally:
        running.kill()


def until(running: subprocess.Popen[str], line: str) -> str:
    """What a command says, up to a line."""
    assert running.stdout is not None
    said = ""
    for text in running.stdout:
        said += text
        if re.search(line, text):
            return said
    raise AssertionError(f"it ended with {running.wait(10)}: {said}")

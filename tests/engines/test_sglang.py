"""A real SGLang server: its environment, its process, and what becomes of both when something is missing or dies."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engine_reference import Reference
from relax_server.engines.base import GenerateRequest
from relax_server.engines.settings import EngineSettings
from relax_server.engines.sglang import environment
from relax_server.engines.sglang.broadcast import WeightGroup
from relax_server.engines.sglang.client import SglangEngine
from relax_server.engines.sglang.environment import find_python, look
from relax_server.engines.sglang.process import SglangProcess
from relax_server.engines.weight_shapes import read_shapes
from relax_server.models.catalog import resolve_model
from safetensors.torch import load_file

import relax_sdk
from relax_sdk.config import SamplingParams
from relax_sdk.errors import ConfigError, EngineError, EngineUnavailable

START_SECONDS = 500.0


def test_what_is_missing_is_said_with_the_command_that_brings_it(tmp_path, monkeypatch):
    monkeypatch.delenv(environment.VENV.variable, raising=False)
    monkeypatch.setenv("RELAX_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(relax_sdk, "__file__", str(tmp_path / "relax_sdk" / "__init__.py"))
    with pytest.raises(ConfigError, match=r"relax engine sglang --install.*make \.venv-sglang.*RELAX_SGLANG_PYTHON"):
        find_python()
    monkeypatch.setenv(environment.VENV.variable, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"nowhere \(from \$RELAX_SGLANG_PYTHON\)"):
        find_python()
    folder = tmp_path / ".venv-sglang" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    monkeypatch.delenv(environment.VENV.variable)
    assert find_python() == folder / "python" == find_python(folder.parent) == find_python(folder / "python")


async def test_an_environment_without_sglang_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no SGLang; .*--install"):
        await look(Path(sys.executable))
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no good >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match="does not run: no good"):
        await look(broken)


def test_shapes_are_read_and_damage_is_named(tmp_path):
    shapes = read_shapes(resolve_model("relax/tiny-llama"))
    assert shapes["model.embed_tokens.weight"][1] == 128
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(EngineError, match="cannot be read"):
        read_shapes(tmp_path)


@pytest.mark.timeout(900)
async def test_a_text_model_is_served_and_updated_and_a_lost_server_is_noticed(sglang, tmp_path):
    stages: list[str] = []
    model = resolve_model("relax/tiny-llama")
    process = SglangProcess(
        model, tmp_path / "log", EngineSettings(max_total_tokens=8192, weight_version=3), progress=stages.append
    )
    with pytest.raises(EngineError, match="not started"):
        _ = process.url
    await process.start(START_SECONDS)
    engine = SglangEngine(process.url, token=process.token)
    try:
        with pytest.raises(EngineError, match="running already"):
            await process.start(START_SECONDS)
        assert stages[0] == "looking for SGLang" and stages[-1] == "ready" and len(stages) > 2
        request = GenerateRequest([20, 30, 40], SamplingParams(max_new_tokens=16, ignore_eos=True), n=3)
        for reference, version in ((Reference(model), 3), (Reference(resolve_model("relax/tiny-llama", 1)), 4)):
            if version == 4:
                await engine.update_weights(str(reference.processor.path), 4)
            for generation in await engine.generate(request, 60):
                reference.check(generation)
                assert [(s.version, s.start, s.end) for s in generation.weight_versions] == [(version, 0, 16)]
        for seed, version in ((2, 5), (0, 6)):  # twice: what was sent once is not sent again
            reference = Reference(resolve_model("relax/tiny-llama", seed))
            await engine.update_from_tensors(load_file(reference.processor.path / "model.safetensors"), version)
            generation = (await engine.generate(request, 60))[0]
            reference.check(generation)
            assert generation.weight_versions[0].version == version
        group = WeightGroup(engine)
        await group.open()
        for seed, version in ((1, 7), (2, 8)):
            reference = Reference(resolve_model("relax/tiny-llama", seed))
            await group.update(load_file(reference.processor.path / "model.safetensors"), version)
            generation = (await engine.generate(request, 60))[0]
            reference.check(generation)
            assert generation.weight_versions[0].version == version
        await group.close()
        with pytest.raises(EngineError, match="not open"):
            await group.update({}, 9)
        for wrong, says in (
            ({"model.norm.weight": torch.zeros(128)}, r"missing \["),
            (load_file(model / "model.safetensors") | {"model.norm.weight": torch.zeros(5)}, r"norm.weight has shape \[5\]"),
        ):
            with pytest.raises(EngineError, match=says):
                await engine.update_from_tensors(wrong, 9)
        refused = SamplingParams(ignore_eos=True, stop_token_ids=(5,))
        with pytest.raises(EngineError, match="ignores stop_token_ids"):
            await engine.generate(GenerateRequest([20], refused), 60)
        server = next(p for p in psutil.Process(process.pid).children() if "launch_server" in " ".join(p.cmdline()))
        server.kill()
        assert await asyncio.wait_for(process.wait(), 30) != 0
        assert not process.alive() and not await engine.health()
    finally:
        await engine.close()
        await process.stop()


@pytest.mark.timeout(600)
async def test_a_start_that_fails_shows_the_log_and_leaves_nothing(sglang, tmp_path):
    process = SglangProcess("relax/tiny-llama", tmp_path / "log", EngineSettings(flags=("--no-such-flag",)))
    with pytest.raises(EngineUnavailable, match=r"(?s)exit code 2.*no-such-flag"):
        await process.start(START_SECONDS)
    assert not process.alive()
    late = SglangProcess("relax/tiny-llama", tmp_path / "late")
    with pytest.raises(EngineUnavailable, match="not ready within"):
        await late.start(1.0)
    assert not late.alive() and late.pid is not None and not psutil.pid_exists(late.pid)


@pytest.mark.parametrize("kind", ["embedded", "sglang"])
@pytest.mark.timeout(1200)
def test_the_command_starts_a_lost_engine_again_and_ends_when_told(kind: str, tmp_path, request):
    if kind == "sglang":
        request.getfixturevalue("sglang")
    command = [sys.executable, "-m", "relax_sdk.cli", "engine", kind, "--model", "relax/tiny-llama", "--port", "0"]
    command += ["--log", str(tmp_path / "log"), "--max-total-tokens", "8192"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert running.stdout is not None
    try:
        said = until(running, r"ready at http://\S+;")
        children = psutil.Process(running.pid).children(recursive=True)
        next(p for p in children if re.search("launch_server|engines.embedded", " ".join(p.cmdline()))).kill()
        said += until(running, r"starting it again")
        said += until(running, r"ready at http://\S+;")
        assert "it ended with exit code" in said
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


async def test_a_group_whose_other_side_is_gone_says_that_the_engine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of both notices it first, the request or the broadcast."""

    class Gone:
        url = "http://127.0.0.1:1"

        async def update_from_group(self, name: str, rows: Any, send: Any, version: int, flush_cache: bool) -> None:
            await send()

    def closed(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("torch.distributed.broadcast", closed)
    group = WeightGroup(Gone())  # type: ignore[arg-type] - a stand-in
    group._group = object()
    with pytest.raises(EngineUnavailable, match="did not take the weights: Connection closed by peer"):
        await group.update({"w": torch.zeros(2)}, 1)

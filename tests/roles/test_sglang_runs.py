"""Whole runs whose answers come from a real SGLang server."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from elastic_run import going
from relax_server.engines.sglang.broadcast import WeightGroup
from relax_server.engines.sglang.environment import find_python
from relax_server.engines.sglang.process import SglangProcess
from relax_server.models.catalog import resolve_model
from run_tokens import tokens_of

import relax_sdk as relax
from relax_sdk.errors import ConfigError

SMALL: dict[str, Any] = dict(
    rollout={"groups_per_step": 4, "group_size": 4, "max_turns": 1},
    warmup={"steps": 2, "batch_size": 4},
    eval={"every": 2, "limit": 8},
    training={"checkpoint_every": 2},
    engine="sglang",
)
SAME_WEIGHTS = 1e-4
"""Largest gap of logprobs at equal weights; routes are replayed, as a near tie of the router is decided by rounding."""

TEXT: dict[str, Any] = {"model": "relax/tiny-llama", "sampling": {"max_new_tokens": 4}, "warmup": {"steps": 0}}
REPLAYED = SMALL["training"] | {"replay_routes": True}

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(autouse=True)
def installed() -> None:
    try:
        find_python()
    except ConfigError as error:
        pytest.skip(str(error))


class Say(relax.Env):
    """Say the letter that is asked for."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.letter = (options or {}).get("task", {"letter": "A"})["letter"]
        return f"Say {self.letter}.", {}

    def step(self, action):
        return None, float(action.text == self.letter), True, False, {}

    @staticmethod
    def tasks():
        return {split: [{"letter": letter} for letter in "ABCD"] for split in ("train", "eval")}


def test_its_start_is_told_on_ray_too(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("ray", reason="the package ray is not installed (pip install 'relax-gym[ray]')")
    monkeypatch.setattr("relax_sdk.progress.PLAIN_EVERY", 0.0)  # else what takes less than that may not be shown
    run = relax.Trainer(Say, folder=tmp_path / "run", runtime="ray", **(SMALL | TEXT)).fit(steps=1)
    assert run.metrics[-1]["step"] == 1
    seen = capsys.readouterr().err
    assert "SGLang: importing SGLang" in seen and "SGLang: ready" in seen


def servers() -> list[psutil.Process]:
    """SGLang processes below this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "sglang" in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.mark.nightly
def test_two_on_policy_runs_of_one_seed_have_the_same_tokens(tmp_path: Path):
    settings: dict[str, Any] = SMALL | TEXT | {"max_staleness": 0}
    first, second = (
        tokens_of(relax.Trainer(Say, folder=tmp_path / name, seed=5, **settings).fit(steps=3, progress=False), 3 * 4)
        for name in ("first", "second")
    )
    assert first == second and len(first) == 3 * 4 * 4
    assert len({str(answer) for answer in first.values()}) > 3 * 4


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("tone-v0", {"training": REPLAYED}),
        ("omni-quiz-v0", {"training": REPLAYED, "rollout": SMALL["rollout"] | {"max_turns": 3}}),
        (Say, TEXT),
    ],
    ids=["audio", "three media", "text"],
)
def test_sglang_and_trainer_agree_after_every_update(tmp_path: Path, env, settings):
    run = relax.Trainer(env, folder=tmp_path / "run", **(SMALL | {"max_staleness": 0} | settings)).fit(steps=3, progress=False)
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    assert max(row["logprob_gap_max"] for row in run.metrics) <= SAME_WEIGHTS
    assert run.metrics[1]["eval_n"] > 0
    assert not servers()


def test_a_lost_server_is_replaced_and_holds_the_weights_of_now(tmp_path: Path):
    folder = tmp_path / "run"
    metrics = folder / "metrics.jsonl"

    def kill() -> None:
        end = time.monotonic() + 900
        while time.monotonic() < end and not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            time.sleep(0.1)
        commands = {process: process.cmdline() for process in servers()}
        next(process for process, command in commands.items() if command[1:3] == ["-m", "sglang.launch_server"]).kill()

    killing = threading.Thread(target=kill)
    killing.start()
    run = relax.Trainer(Say, folder=folder, **(SMALL | TEXT | {"max_staleness": 0})).fit(steps=8, progress=False)
    killing.join(5)
    assert [row["step"] for row in run.metrics] == list(range(1, 9))
    assert max(row["logprob_gap_max"] for row in run.metrics) <= SAME_WEIGHTS
    assert (folder / "logs" / "engine-e1.log").read_text().count("Load weight begin") == 2
    assert not servers()


async def test_weights_are_sent_to_a_server_that_cannot_read_them(tmp_path: Path):
    process = SglangProcess(resolve_model("relax/tiny-llama"), tmp_path / "sglang.log")
    await process.start(600)
    url, token = process.url, process.token
    try:
        text: dict[str, Any] = {name: TEXT[name] for name in ("model", "sampling")}
        async with going(tmp_path / "run", Say, max_staleness=0, **text) as run:
            await run.ask(lambda control: control.add("far", url, "sglang", token, "broadcast"))
            await run.engine("far", "current", seconds=180)
            await run.ask(lambda control: control.remove("e1", 30))
            await run.engine("e1", "gone")
            first = len(run.heard.steps)
            await run.steps(4)
        assert max(row["logprob_gap_max"] for row in run.heard.steps[first + 1 :]) <= SAME_WEIGHTS
        assert len({span.version for turn in run.turns() if turn.engine == url for span in turn.weight_versions}) > 2
        assert process.alive(), "it is not the run's"
    finally:
        await process.stop()
    assert not servers()


async def test_a_server_that_dies_while_weights_are_sent_to_it_costs_the_run_nothing(tmp_path: Path, monkeypatch):
    process = SglangProcess(resolve_model("relax/tiny-llama"), tmp_path / "sglang.log")
    await process.start(600)
    send, sent = WeightGroup._send, 0

    def dying(group: WeightGroup, tensors: list[Any]) -> None:
        nonlocal sent
        sent += 1
        if sent == 4:
            send(group, tensors[:2])
            for server in psutil.Process(process.pid).children(recursive=True):
                server.kill()
        send(group, tensors[2:] if sent == 4 else tensors)

    monkeypatch.setattr(WeightGroup, "_send", dying)
    try:
        text: dict[str, Any] = {name: TEXT[name] for name in ("model", "sampling")}
        async with going(tmp_path / "run", Say, max_staleness=0, **text) as run:
            await run.ask(lambda control: control.add("far", process.url, "sglang", process.token, "broadcast"))
            await run.engine("far", "lost", seconds=180)
            await run.steps(4)
    finally:
        await process.stop()
    assert sent >= 4 and not servers()


def test_what_sglang_cannot_do_on_a_cpu_is_refused_at_once(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"mode='colocate'.*engine='embedded'"):
        relax.Trainer("tone-v0", folder=tmp_path / "run", mode="colocate", **SMALL).fit(steps=1, progress=False)
    assert not servers()

"""Whole runs whose answers come from a real vLLM server."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from relax_server.engines.vllm.environment import VENV
from run_tokens import tokens_of

import relax_sdk as relax
from relax_sdk.errors import ConfigError

SMALL: dict[str, Any] = dict(
    model="relax/tiny-qwen3",
    rollout={"groups_per_step": 4, "group_size": 4, "max_turns": 1},
    warmup={"steps": 0},
    eval={"every": 2, "limit": 8},
    training={"checkpoint_every": 2},
    sampling={"max_new_tokens": 4},
    engine="vllm",
    max_staleness=0,
)
SAME_WEIGHTS = 1e-4
"""Largest gap of logprobs at equal weights."""

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(autouse=True)
def installed() -> None:
    try:
        VENV.find()
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


def servers() -> list[psutil.Process]:
    """vLLM's API servers below this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]:
                found.append(process)
    return found


@pytest.mark.nightly
def test_two_on_policy_runs_of_one_seed_have_the_same_tokens(tmp_path: Path):
    settings: dict[str, Any] = SMALL
    first, second = (
        tokens_of(relax.Trainer(Say, folder=tmp_path / name, seed=5, **settings).fit(steps=3, progress=False), 3 * 4)
        for name in ("first", "second")
    )
    assert first == second and len(first) == 3 * 4 * 4
    assert len({str(answer) for answer in first.values()}) > 3 * 4


@pytest.mark.parametrize("model", ["relax/tiny-qwen3", "relax/tiny-llama"])
def test_vllm_and_trainer_agree_after_every_update(tmp_path: Path, model: str):
    run = relax.Trainer(Say, folder=tmp_path / "run", **(SMALL | {"model": model})).fit(steps=3, progress=False)
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    assert max(row["logprob_gap_max"] for row in run.metrics) <= SAME_WEIGHTS
    assert run.metrics[1]["eval_n"] > 0
    assert not servers()


def test_generation_goes_on_across_updates(tmp_path: Path):
    settings = SMALL | {"max_staleness": 1, "sampling": {"max_new_tokens": 48}}
    run = relax.Trainer(Say, folder=tmp_path / "run", **settings).fit(steps=4, progress=False)
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert max(row["staleness_max"] for row in run.metrics) <= 1
    assert not servers()


def test_a_lost_server_is_replaced_and_holds_the_weights_of_now(tmp_path: Path):
    folder = tmp_path / "run"
    metrics = folder / "metrics.jsonl"

    def kill() -> None:
        end = time.monotonic() + 900
        while time.monotonic() < end and not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            time.sleep(0.1)
        servers()[0].kill()

    killing = threading.Thread(target=kill)
    killing.start()
    run = relax.Trainer(Say, folder=folder, **SMALL).fit(steps=8, progress=False)
    killing.join(5)
    assert [row["step"] for row in run.metrics] == list(range(1, 9))
    assert max(row["logprob_gap_max"] for row in run.metrics) <= SAME_WEIGHTS
    assert (folder / "logs" / "engine-e1.log").read_text().count("Starting to load model") == 2
    assert not servers()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mode": "colocate"}, r"mode='colocate'.*engine='embedded'"),
        ({"model": "relax/tiny-omni"}, r"takes media.*engine='embedded'"),
    ],
)
def test_what_vllm_cannot_do_is_refused_at_once(tmp_path: Path, settings: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        relax.Trainer(Say, folder=tmp_path / "run", **(SMALL | settings)).fit(steps=1, progress=False)
    assert not servers()

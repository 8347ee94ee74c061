"""The rollout service in front of a real vLLM server that runs already."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from relax_server.engines.tokens import find_token
from relax_server.engines.vllm.environment import VENV
from service_process import Service, start

import relax_sdk as relax
from relax_sdk.errors import ConfigError

pytestmark = pytest.mark.timeout(900)


class Say(relax.Env):
    """Say the letter that is asked for."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"Say {(options or {})['task']['letter']}.", {}

    def step(self, action):
        return None, float(bool(action.text)), True, False, {}

    @staticmethod
    def tasks():
        return {split: [{"letter": letter} for letter in "ABCD"] for split in ("train", "eval")}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, str]]:
    try:
        VENV.find()
    except ConfigError as error:
        pytest.skip(str(error))
    folder: Path = tmp_path_factory.mktemp("vllm")
    command = [sys.executable, "-m", "relax_sdk.cli", "engine", "vllm", "--port", "0", "--log", str(folder / "log")]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert engine.stdout is not None
        url = next(found[1] for line in engine.stdout if (found := re.search(r"ready at (http://\S+);", line)))
        service = start(folder / "service", "--model", "relax/tiny-qwen3", "--engine", url, "--drain-seconds", "1")
        yield service, url
        service.stop()
    finally:
        engine.terminate()
        engine.wait(30)


def test_groups_are_played_and_recorded(vllm: tuple[Service, str]) -> None:
    with relax.Client(vllm[0].url) as client:
        rollout = client.rollout("higher-lower-v0", n=2, group_size=3)
        groups = [event.data for event in rollout.events() if event.kind == "group"]
        assert len(groups) == 2 and rollout.refresh().state == "completed"
        for row in [row for group in groups for row in group["trajectories"]]:
            turns = client.trajectory(row["id"]).turns
            assert all(len(turn.response_logprobs) == len(turn.response_ids) > 0 for turn in turns)
            assert turns[0].weight_versions[0].version == 0 and turns[0].prompt_ids


def test_its_chat_route_is_evaluated(vllm: tuple[Service, str]) -> None:
    endpoint = relax.Endpoint(vllm[1] + "/v1", "relax/tiny-qwen3", find_token(vllm[1]))
    result = endpoint.evaluate(Say, limit=3, sampling={"max_new_tokens": 8})
    assert result.n == 3 and not result.failures and not result.trajectories[0].samples()

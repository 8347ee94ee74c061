"""The rollout service in front of a real SGLang server that runs already."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from relax_server.engines.sglang.environment import find_python
from service_process import Service, start

import relax_sdk as relax
from relax_sdk.errors import ConfigError

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    try:
        find_python()
    except ConfigError as error:
        pytest.skip(str(error))
    folder: Path = tmp_path_factory.mktemp("sglang")
    command = [sys.executable, "-m", "relax_sdk.cli", "engine", "sglang", "--port", "0", "--log", str(folder / "log")]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert engine.stdout is not None
        url = next(found[1] for line in engine.stdout if (found := re.search(r"ready at (http://\S+);", line)))
        service = start(folder / "service", "--engine", url, "--drain-seconds", "1")
        yield service
        service.stop()
    finally:
        engine.terminate()
        engine.wait(30)


def test_groups_with_media_are_played(sglang: Service) -> None:
    with relax.Client(sglang.url) as client:
        for env, kinds in (("tone-v0", {"audio"}), ("omni-quiz-v0", {"image", "audio", "video"})):
            rollout = client.rollout(env, n=2, group_size=3)
            groups = [event.data for event in rollout.events() if event.kind == "group"]
            assert len(groups) == 2 and rollout.refresh().state == "completed"
            for group in groups:
                for row in group["trajectories"]:
                    trajectory = client.trajectory(row["id"])
                    turns = trajectory.turns
                    assert {ref.kind for turn in turns for ref in turn.media} <= kinds
                    assert all(len(turn.response_logprobs) == len(turn.response_ids) > 0 for turn in turns)


def test_an_agent_s_session_is_recorded(sglang: Service) -> None:
    with relax.Client(sglang.url) as client, client.session("tone-v0") as session:
        step = session.step(session.chat(session.observation))
        done = session.finish()
        turn = client.trajectory(done.trajectory_id).turns[0]
    assert turn.weight_versions[0].version == 0 and turn.prompt_ids and step.terminated

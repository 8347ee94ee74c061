"""A model behind an OpenAI-compatible URL, played on environments: a session of the rollout service stands for any."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from relax_server.engines.openai import parameters, wire
from relax_server.journal import open_journal
from service_process import Service

import relax_sdk as relax
from relax_sdk import Audio, Endpoint, Image, MediaStore, Message, Text, Trainer, Video
from relax_sdk.config import RunConfig, SamplingParams
from relax_sdk.errors import ConfigError, RunError
from relax_sdk.trajectory import Status

SHORT = {"sampling": {"max_new_tokens": 4}}


class Twice(relax.Env):
    """Two turns of text; the second action is rewarded by its length."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return "say something", {}

    def step(self, action):
        self.turn += 1
        return "and again", float(len(action.text) > 0), self.turn == 2, False, {"turn": self.turn}

    @relax.reward(weight=0.5)
    def asked(self, trajectory):
        return float(len(trajectory.messages))

    @staticmethod
    def tasks():
        return {split: [{"n": n} for n in range(6)] for split in ("train", "eval")}


class Broken(Twice):
    """Fails at every task but the first."""

    def reset(self, *, seed=None, options=None):
        if (options or {})["task"]["n"]:
            raise KeyError("no such thing")
        return super().reset(seed=seed, options=options)


@pytest.fixture
def url(service: Service) -> Iterator[str]:
    """The base URL of a session without an environment: every conversation that is asked there is answered."""
    session = service.open()
    yield session["base_url"]
    with service.client() as client:
        assert client.delete(f"/v1/sessions/{session['id']}").status_code == 200


async def evaluate(endpoint: Endpoint, *arguments, **settings):
    return await asyncio.to_thread(endpoint.evaluate, *arguments, **settings)


async def test_turns_are_played_and_scored_without_tokens(url: str):
    result = await evaluate(Endpoint(url, "tiny"), Twice, limit=4, **SHORT)
    assert result.n == len(result.trajectories) == 4 and not result.failures
    assert set(result.components) == {"env", "asked"} and result.components["asked"] == 5.0
    for trajectory in result.trajectories:
        assert trajectory.status == Status.COMPLETED and len(trajectory.turns) == 2
        assert [m["role"] for m in trajectory.messages] == ["user", "assistant", "user", "assistant", "user"]
        assert not trajectory.samples() and trajectory.version_min is None
        assert trajectory.info["tokens"].startswith("unknown: played with tiny")
        assert trajectory.reward == trajectory.rewards["env"] + 0.5 * 5


@pytest.mark.parametrize("env", ["tone-v0", "colour-v0", "motion-v0", "omni-quiz-v0", "higher-lower-v0"])
async def test_media_and_tools_reach_the_model(url: str, env: str):
    result = await evaluate(Endpoint(url, "tiny"), env, limit=3, **SHORT)
    assert result.n == 3 and not result.failures
    if env != "higher-lower-v0":
        assert all(trajectory.turns[0].media for trajectory in result.trajectories)


async def test_greedy_answers_are_the_same_again(url: str):
    first, again = [await evaluate(Endpoint(url, "tiny", concurrency=1), Twice, limit=2, **SHORT) for _ in range(2)]
    assert [t.messages for t in first.trajectories] == [t.messages for t in again.trajectories]


async def test_an_episode_that_fails_is_counted_and_is_in_no_mean(url: str):
    result = await evaluate(Endpoint(url, "tiny"), Broken, limit=3, **SHORT)
    assert result.n == 1 and result.failures == {"EnvError": 2} and len(result.trajectories) == 3
    assert result.mean_reward == result.trajectories[0].reward > 0
    assert all("no such thing" in (t.error or "") for t in result.trajectories[1:])


async def test_it_tells_how_far_it_is(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("relax_sdk.progress.PLAIN_EVERY", 0.0)
    await evaluate(Endpoint(url, "tiny"), Twice, limit=3, **SHORT)
    seen = capsys.readouterr().err
    assert "[eval] with tiny · ━" in seen and "1 of 3 episodes, mean reward" in seen and " s left" in seen
    assert f"{'━' * 20} 3 of 3 episodes, mean reward" in seen and " a second" in seen
    await evaluate(Endpoint(url, "tiny"), Twice, limit=3, progress=False, **SHORT)
    assert capsys.readouterr().err == ""


async def test_a_limit_on_turns_truncates(url: str):
    result = await evaluate(Endpoint(url, "tiny"), Twice, limit=1, rollout={"max_turns": 1}, **SHORT)
    assert result.trajectories[0].status == Status.TRUNCATED and len(result.trajectories[0].turns) == 1


async def test_what_the_server_refuses_is_said(url: str):
    with pytest.raises(RunError, match=r"none of 1 episodes.*404"):
        await evaluate(Endpoint(url + "/nowhere", "tiny"), Twice, limit=1, **SHORT)
    with pytest.raises(RunError, match=r"none of 1 episodes.*127\.0\.0\.1:9"):
        await evaluate(Endpoint("http://127.0.0.1:9/v1", "tiny"), Twice, limit=1, rollout={"turn_timeout": 1.0}, **SHORT)
    with pytest.raises(ConfigError, match="no 'test' split"):
        await evaluate(Endpoint(url, "tiny"), Twice, "test")
    with pytest.raises(ConfigError, match=r"sampling\.top_k = 5"):
        await evaluate(Endpoint(url, "tiny"), Twice, limit=1, sampling={"top_k": 5})


async def test_the_command_evaluates_in_a_folder(url: str, tmp_path: Path):
    command = [sys.executable, "-m", "relax_sdk.cli", "eval", "tone-v0", "--engine-url", url, "--limit", "2"]
    command += ["--out", str(tmp_path / "out"), "--set", "sampling.max_new_tokens=4"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "--engine-model" in done.stderr
    keyed = [*command, "--engine-model", "tiny", "--api-key-env", "RELAX_NO_SUCH_KEY"]
    done = await asyncio.to_thread(subprocess.run, keyed, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "RELAX_NO_SUCH_KEY: there is no such variable" in done.stderr
    done = await asyncio.to_thread(
        subprocess.run, [*command, "--engine-model", "tiny"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "# tone-v0 [eval] with tiny" in done.stdout and "2 episodes of 2 of 2 tasks; 0 failed" in done.stdout
    report = relax.EvalReport.load(tmp_path / "out")
    assert report.complete and report.model == "tiny" and len(report.episodes) == 2
    journal = open_journal(tmp_path / "out" / "journal.db")
    kept = journal.trajectory(report.episodes[0].id)
    journal.close()
    assert kept.turns[0].response_ids == [] and kept.messages, "messages, and no tokens"
    assert MediaStore(tmp_path / "out" / "media").get(kept.turns[0].media[0]), "what the model heard is kept too"


def test_the_variables_of_openai_s_client_are_the_defaults(monkeypatch: pytest.MonkeyPatch):
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert Endpoint(model="m").url == "https://api.openai.com/v1" and Endpoint(model="m").api_key is None
    monkeypatch.setenv("OPENAI_BASE_URL", "http://h/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert (Endpoint(model="m").url, Endpoint(model="m").api_key) == ("http://h/v1", "k")
    assert (Endpoint("http://x/v1", "m", "own").url, Endpoint("http://x/v1", "m", "own").api_key) == ("http://x/v1", "own")
    assert not Endpoint("http://x/v1", "m", "").api_key, "an empty key: none is sent"


def test_training_with_a_url_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match=r"token ids.*relax eval ENV --engine-url"):
        Trainer("tone-v0", engine="http://127.0.0.1:8000/v1")  # type: ignore[arg-type]
    assert RunConfig("tone-v0", engine="vllm").engine == "vllm"


def test_settings_are_checked():
    for arguments, says in ((("ftp://x", "m"), "Endpoint.url"), (("http://x", ""), "Endpoint.model")):
        with pytest.raises(ConfigError, match=says):
            Endpoint(*arguments)
    assert "secret" not in repr(Endpoint("http://x", "m", "secret"))


def test_the_wire_is_openai_s():
    sound = Audio.from_array(np.zeros(1600))
    image = Image.from_array(np.zeros((8, 8, 3), np.uint8))
    video = Video.from_array(np.zeros((2, 16, 16, 3), np.uint8), fps=2)
    content = wire(Message("user", (Text("see"), image, sound, video)))["content"]
    assert [part["type"] for part in content] == ["text", "image_url", "input_audio", "video_url"]
    assert content[1]["image_url"]["url"].startswith("data:image/png;base64,")
    assert content[2]["input_audio"]["format"] == "wav" and content[2]["input_audio"]["data"]
    sent = parameters(SamplingParams(max_new_tokens=9, top_p=0.5, stop=("x",), sampling_seed=3))
    assert sent == {"max_tokens": 9, "temperature": 1.0, "top_p": 0.5, "stop": ["x"], "seed": 3}

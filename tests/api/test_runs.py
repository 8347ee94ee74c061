"""Training at a service: submitted from here, followed, left alone, and found again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from service_process import Service, start

import relax_sdk as relax

SMALL: dict[str, Any] = {
    "rollout": {"groups_per_step": 2, "group_size": 2},
    "sampling": {"max_new_tokens": 2},
    "warmup": {"steps": 2},
    "eval": {"every": 2, "limit": 4},
    "training": {"checkpoint_every": 2},
}


@pytest.fixture(scope="module")
def station(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service of its own with keys, as its runs are heavy."""
    from relax_server.api.keys import KeyRing
    from relax_server.journal.sql import SqlJournal

    folder = tmp_path_factory.mktemp("station")
    journal = SqlJournal(folder / "journal.db")
    secret, _ = KeyRing(journal).create("root", ["admin"])
    journal.close()
    it = start(folder, key=secret)
    yield it
    it.stop()


def trainer(station: Service, env: Any, folder: Path, **more: Any) -> relax.Trainer:
    return relax.Trainer(env, server=station.url, key=station.key, folder=folder, **(SMALL | more))


def test_a_run_at_the_service_is_as_one_here(station: Service, tmp_path: Path) -> None:
    run = trainer(station, "tone-v0", tmp_path / "run").fit(steps=4, progress=False)
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4] and "eval_reward" in run.metrics[3]
    assert len(run.history) == 4
    with run:
        assert 0 <= run.evaluate(limit=3).mean_reward <= 1
        played = run.evaluate(limit=3)
        assert played.n == len(played.trajectories) == 3
        assert played.mean_reward == pytest.approx(sum(t.reward for t in played.trajectories) / 3)
        assert all(t.turns[0].response_ids and t.turns[0].media[0].kind == "audio" for t in played.trajectories)
        assert isinstance(run.generate("hello"), relax.AssistantMessage)
    note = json.loads((run.folder / "service.json").read_text())
    with relax.Client(station.url, station.key) as client:
        there = client.get_run(note["run"])
        assert there.state.state == "completed" and there.state.step == 4
        assert [row["step"] for row in there.metrics(after=2)] == [3, 4]
        files = there.files()
        assert (
            "hf/config.json" in files and "reward.png" in files and len(there.file("hf/config.json")) == files["hf/config.json"]
        )
        for name in ("config.json", "%2e%2e/journal.db", "hf/%2e%2e/config.json", "hf"):
            with pytest.raises(relax.ServiceError, match="no file"):
                there.file(name)
        assert note["run"] in [state.id for state in client.runs()]


class Letter(relax.Env):
    """Answer with the letter; counts its steps in the memory of whoever hosts it."""

    steps = 0
    modalities = {"image"}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.letter = (options or {})["task"]["letter"]
        return [relax.Image.from_array(np.full((28, 28, 3), 30, np.uint8)), f"say {self.letter}"], {}

    def step(self, action: relax.AssistantMessage) -> Any:
        Letter.steps += 1
        return None, float(action.text.startswith(self.letter)), True, False, {}

    def format_example(self, rng: Any) -> str:
        return "AB"[int(rng.integers(2))]


LETTERS = {"train": [{"letter": letter} for letter in "AB"], "eval": [{"letter": "A"}]}


@pytest.mark.nightly
def test_an_environment_of_this_process_is_trained_on_there(station: Service, tmp_path: Path) -> None:
    """Warm-up, training and evaluation all step the environment here."""
    Letter.steps = 0
    spec = relax.EnvSpec("letter-here", Letter, LETTERS)
    run = trainer(station, spec, tmp_path / "run").fit(steps=2, progress=False)
    assert len(run.metrics) == 2 and Letter.steps >= 2 * 4
    before = Letter.steps
    with run:
        assert run.evaluate(limit=1).n == 1
    assert Letter.steps == before + 1


def test_an_uploaded_environment_is_trained_on_in_a_worker(station: Service, sandbox: None, tmp_path: Path) -> None:
    Letter.steps = 0
    spec = relax.EnvSpec("letter-there", Letter, LETTERS)
    run = trainer(station, spec, tmp_path / "run", provide="upload").fit(steps=2, progress=False)
    assert len(run.metrics) == 2 and Letter.steps == 0


@pytest.mark.nightly
def test_a_run_goes_on_without_whoever_began_it(station: Service, tmp_path: Path) -> None:
    """Ctrl-C leaves it alone; `fit(resume=True)` finds it again, and the history is whole."""
    script = tmp_path / "train.py"
    script.write_text(
        f"import signal\nimport relax_sdk as relax\n"
        f"signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell begin with it ignored\n"
        f"relax.Trainer('tone-v0', server={station.url!r}, key={station.key!r}, folder={str(tmp_path / 'run')!r}, "
        f"**{SMALL!r}).fit(steps=6, progress=False)\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    _until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0 and "goes on at" in errors
    again = relax.Trainer("tone-v0", server=station.url, key=station.key, folder=tmp_path / "run", **SMALL)
    run = again.fit(steps=6, resume=True, progress=False)
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5, 6]


@pytest.mark.nightly
def test_a_run_waits_for_the_host_of_its_environment(station: Service, tmp_path: Path) -> None:
    """A closed notebook takes its environment away: the run stops after a checkpoint, and goes on when it is back."""
    spec = relax.EnvSpec("letter-away", Letter, LETTERS)
    config = relax.Trainer(spec, **SMALL).config.to_dict() | {"steps": 6}
    config.pop("env")
    with relax.Client(station.url, station.key) as client:
        with relax.host(spec, station.url, station.key) as hosting:
            run = client.run("letter-away", config=config)
            _until(lambda: run.refresh().step >= 1)
            hosting.close()
        _until(lambda: run.refresh().state == "waiting", seconds=120)
        step = run.state.step
        assert 1 <= step < 6
        with relax.host(spec, station.url, station.key):
            assert run.wait().state == "completed", run.state
        steps = [event.data["step"] for event in run.events() if event.kind == "step"]
        assert sorted(set(steps)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.nightly
def test_cancelled_and_taken_up_again(station: Service, tmp_path: Path) -> None:
    config = relax.Trainer("tone-v0", **SMALL).config.to_dict() | {"steps": 400}
    config.pop("env")
    with relax.Client(station.url, station.key) as client:
        run = client.run("tone-v0", config=config)
        waiting = client.run("tone-v0", config=config)
        _until(lambda: run.refresh().step >= 1)
        assert waiting.refresh().state == "queued"  # one after the other
        assert waiting.cancel().state == "cancelled"
        with pytest.raises(relax.ServiceError, match="no trained weights"):
            waiting.evaluate()
        assert run.cancel().state == "cancelled" and run.state.step < 400
        last = list(run.events())[-1]
        assert last.kind == "finished" and last.data["state"] == "cancelled"
        run.resume()
        step = run.state.step
        _until(lambda: run.refresh().step > step)
        with pytest.raises(relax.ServiceError, match="only one that failed"):
            run.resume()
        run.cancel()


@pytest.mark.nightly
def test_the_service_is_killed_and_the_run_goes_on(tmp_path: Path, service: Service) -> None:
    with service.client() as http:
        engine = http.get("/v1/models").json()["engines"][0]["url"]
    one = start(tmp_path / "s", "--engine", engine)
    config = relax.Trainer("tone-v0", **SMALL).config.to_dict() | {"steps": 8}
    config.pop("env")
    with relax.Client(one.url) as client:
        id = client.run("tone-v0", config=config).id
        _until(lambda: client.get_run(id).state.step >= 3)
    children = psutil.Process(one.process.pid).children(recursive=True)
    one.process.send_signal(signal.SIGKILL)
    one.process.wait(30)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive, alive
    two = start(tmp_path / "s", "--engine", engine)
    try:
        with relax.Client(two.url) as client:
            assert client.get_run(id).wait().state == "completed"
            assert [row["step"] for row in client.get_run(id).metrics()] == list(range(1, 9))
    finally:
        two.stop()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"env": "nothing-v0"}, 404, "no environment"),
        ({"env": "tone-v0", "config": {"model": "/etc"}}, 400, "model"),
        ({"env": "tone-v0", "config": {"steps": 0}}, 400, "steps"),
        ({"env": "tone-v0", "config": {"stepz": 1}}, 400, "stepz"),
        ({"env": "tone-v0", "config": {"engines": 99}}, 400, "engines"),
        ({"env": "tone-v0", "config": {"rollout": {"group_size": "many"}}}, 400, "group_size"),
        ({"env": "tone-v0", "agent": "rm -rf /"}, 403, "upload"),
        ({"env": "tone-v0", "config": {"engine": "sglang", "engine_flags": ["--host", "0.0.0.0"]}}, 403, "admin"),
        ({"env": "tone-v0", "config": {"engine_flags": ["--tp", "2"]}}, 400, "engine='sglang'"),
        ({"env": "none"}, 400, "environment"),
    ],
)
def test_what_cannot_be_submitted(service: Service, body: dict, status: int, message: str) -> None:
    with service.client() as http:
        answer = http.post("/v1/runs", json=body)
    assert answer.status_code == status and message in answer.json()["error"]["message"], answer.text


def test_a_command_is_no_upload(locked: Service) -> None:
    """It runs outside the sandbox, so the right to upload is not enough where uploads are not trusted."""
    with locked.client() as http:
        secret = http.post("/v1/keys", json={"name": "up", "rights": ["run", "upload"]}).json()["secret"]
    with locked.client(secret) as http:
        answer = http.post("/v1/runs", json={"env": "tone-v0", "agent": ["cat", "/etc/shadow"]})
        traces = http.post("/v1/runs", json={"env": "tone-v0", "config": {"tracking": {"traces": "http://10.0.0.1:4318"}}})
        tracker = http.post("/v1/runs", json={"env": "tone-v0", "config": {"tracking": {"trackers": ["os:system"]}}})
        own = http.post("/v1/runs", json={"env": "tone-v0", "config": {"algorithm": {"advantage": "os:system"}}})
    assert answer.status_code == 403 and "outside the sandbox" in answer.json()["error"]["message"]
    assert traces.status_code == 403 and "config.tracking.traces" in traces.json()["error"]["message"]
    assert tracker.status_code == 403 and "os:system runs inside the service" in tracker.json()["error"]["message"]
    assert own.status_code == 403 and "config.algorithm.advantage" in own.json()["error"]["message"]


def test_a_run_that_fails_says_why(station: Service, tmp_path: Path) -> None:
    class Broken(Letter):
        def step(self, action: relax.AssistantMessage) -> Any:
            raise KeyError("lost")

    spec = relax.EnvSpec("broken-here", Broken, LETTERS)
    with pytest.raises(relax.RunError, match=r"KeyError: 'lost'"):
        trainer(station, spec, tmp_path / "run", warmup={"steps": 0}, rollout={"max_failed_groups": 2}).fit(
            steps=2, progress=False
        )


def test_an_agent_that_is_a_function_stays_here(station: Service, tmp_path: Path) -> None:
    async def agent(session: relax.Session) -> None: ...

    with pytest.raises(relax.ConfigError, match="function cannot be sent"):
        trainer(station, "tone-v0", tmp_path / "run", agent=agent).fit(steps=1, progress=False)
    with pytest.raises(relax.ConfigError, match="server="):
        relax.Trainer("tone-v0", key="k")


def test_the_same_idempotency_key_is_the_same_run(station: Service) -> None:
    with relax.Client(station.url, station.key) as client:
        config = {"steps": 1}
        one, two = [client.run("tone-v0", config=config, idempotency_key="twice") for _ in range(2)]
        assert one.id == two.id
        with pytest.raises(relax.ServiceError, match="another request"):
            client.run("tone-v0", config={"steps": 2}, idempotency_key="twice")
        one.cancel()


def _until(ready: Any, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "not in time"
        threading.Event().wait(0.1)

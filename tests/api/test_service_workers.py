"""`relax serve --workers 2`: several processes behind one port, one of which may die."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hosted_envs
import httpx
import numpy as np
import psutil
import pytest
from relax_server.api.keys import KeyRing
from relax_server.api.workers.supervisor import HUNG_SECONDS, LOOK_SECONDS
from relax_server.journal.sql import SqlJournal
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from scripted_server import ScriptedServer
from service_process import Service, start

import relax_sdk as relax

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """An engine that answers at once."""
    it = ScriptedServer(Processor.load(resolve_model("relax/tiny-omni")))
    it.start()
    it.repeats("A")
    yield it.url
    it.stop()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, engine: str) -> Iterator[Service]:
    """A service of two workers, and a key to it."""
    folder = tmp_path_factory.mktemp("two")
    journal = SqlJournal(folder / "journal.db")
    secret, _ = KeyRing(journal).create("root", ["admin"])
    journal.close()
    it = start(folder, "--workers", "2", "--engine", engine, "--drain-seconds", "1", key=secret)
    yield it
    it.stop()


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.05)


def worker(session: dict[str, Any]) -> int:
    """The worker that a session lives in."""
    number, mark, _ = session["id"].removeprefix("s_").partition(".")
    return int(number) if mark else 0


def sessions(client: httpx.Client, number: int = 2) -> list[dict[str, Any]]:
    """A session at each worker."""
    found: dict[int, dict[str, Any]] = {}
    while len(found) < number:
        answer = client.post("/v1/sessions", json={"sampling": {"max_new_tokens": 1}})
        assert answer.status_code == 201, answer.text
        found.setdefault(worker(answer.json()), answer.json())
    return [found[i] for i in range(number)]


def ask(client: httpx.Client, session: dict[str, Any], at: str = "") -> httpx.Response:
    """A model call, at the session's own URL or at `at` with the session's key."""
    headers = {"Authorization": f"Bearer {session['key']}"}
    path = at or f"/v1/sessions/{session['id']}/openai/v1"
    return client.post(f"{path}/chat/completions", json={"messages": HELLO}, headers=headers)


def status(client: httpx.Client, session: dict[str, Any]) -> int:
    """The status of a session's route; 0 where the connection broke, which was at a worker that was killed."""
    try:
        return client.get(f"/v1/sessions/{session['id']}").status_code
    except httpx.TransportError:
        return 0


def workers(it: Service) -> list[psutil.Process]:
    """The processes of the workers, in their order."""
    children = psutil.Process(it.process.pid).children()
    return [process for process in children if "relax_server.api.workers.process" in process.cmdline()]


def gone(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def test_one_connection_plays_sessions_of_both_workers(two: Service) -> None:
    with two.client() as client:
        both = sessions(client)
        for _ in range(3):
            for session in both:
                assert ask(client, session).status_code == 200
                assert ask(client, session, "/v1/openai/v1").status_code == 200
        for session in both:
            assert client.get(f"/v1/sessions/{session['id']}").json()["turns"] == 6
            with client.stream("GET", f"/v1/sessions/{session['id']}/events") as stream:
                assert next(stream.iter_lines()).startswith("id: ")
            done = client.post(f"/v1/sessions/{session['id']}/finish").json()
            assert done["status"] == "completed"
        for session in both * 2:  # also asked of the other worker, as the connection is at either
            assert len(client.get(f"/v1/trajectories/{session['trajectory_id']}").json()["turns"]) == 6
        assert client.get("/v1/sessions/s_99.ab").status_code == 404


def test_a_call_outside_of_sessions_is_recorded(two: Service) -> None:
    with two.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": HELLO})
        assert answer.status_code == 200
        assert client.get(f"/v1/trajectories/{answer.headers['X-Relax-Trajectory']}").status_code == 200


def test_what_is_true_of_the_whole_service_is_told_and_done_by_every_worker(two: Service) -> None:
    with two.client() as client:
        both = sessions(client)
        listed = client.get("/v1/sessions", params={"limit": 1000}).json()["sessions"]
        assert {session["id"] for session in both} <= {row["id"] for row in listed}
        times = [row["opened_at"] for row in listed if row["state"] == "running"]
        assert times == sorted(times, reverse=True)

        assert client.post("/v1/pause").json() == {"status": "paused"}
        for _ in range(2):
            for session in both:
                client.get(f"/v1/sessions/{session['id']}")  # so that the connection is there
                assert client.get("/healthz").json() == {"status": "paused"}
                assert client.post("/v1/sessions", json={}).status_code == 503
        assert client.post("/v1/resume").json() == {"status": "ok"}
        assert all(ask(client, session).status_code == 200 for session in both)
        for session in both:
            client.get(f"/v1/sessions/{session['id']}")
            text = client.get("/metrics").text
            for number in ("0", "1"):
                assert f'relax_sessions_open{{worker="{number}"}}' in text
                assert re.search(f'relax_model_calls_total{{end="[a-z]+",worker="{number}"}} [1-9]', text)
            assert text.count("# TYPE relax_model_calls_total counter") == 1


def test_engines_come_and_go_in_every_worker(two: Service, engine: str) -> None:
    other = ScriptedServer(Processor.load(resolve_model("relax/tiny-omni")))
    other.start()
    other.repeats("B")
    try:
        with two.client() as client:
            both = sessions(client)
            assert client.post("/v1/engines", json={"url": other.url}).status_code == 201
            first = engine.removeprefix("http://")
            assert client.delete(f"/v1/engines/{first}", params={"drain_seconds": 0}).status_code == 202
            for session in both:
                until(lambda session=session: models(client, session) == [other.url])
                assert ask(client, session).status_code == 200
            assert len(other.prompts) == 2
            assert client.post("/v1/engines", json={"url": engine}).status_code == 201
            assert client.delete(f"/v1/engines/{other.url.removeprefix('http://')}").status_code == 202
            for session in both:
                until(lambda session=session: models(client, session) == [engine])
    finally:
        other.stop()


def models(client: httpx.Client, session: dict[str, Any]) -> list[str]:
    """The engines of a session's worker."""
    client.get(f"/v1/sessions/{session['id']}")
    return [row["url"] for row in client.get("/v1/models").json()["engines"]]


class Count(relax.Env):
    """Played in this process."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return [relax.Image.from_array(np.full((28, 28, 3), 9, np.uint8)), f"in process {os.getpid()}"], {}

    def step(self, action: relax.AssistantMessage) -> Any:
        return None, 1.5, True, False, {}


def test_an_environment_that_this_process_hosts_is_played_by_both_workers(two: Service) -> None:
    with two.client() as http:
        unknown = [http.get(f"/v1/sessions/{session['id']}") and refused(http) for session in sessions(http)]
        assert unknown == ["environment_not_found"] * 2
    for _ in range(2):  # the second time by another host
        with relax.host(Count, two.url, id="count-here", key=two.key), relax.Client(two.url, two.key) as client:
            seen = set()
            for _ in range(4):
                with client.session("count-here", sampling={"max_new_tokens": 1}) as session:
                    seen.add(worker({"id": session.id}))
                    assert session.observation[0]["content"][1]["text"] == f"in process {os.getpid()}"
                    session.step(session.chat(session.observation))
                    assert session.finish().reward == 1.5
            assert seen == {0, 1}
    with two.client() as http:
        assert {refused(http) for _ in range(4)} == {"environment_not_found"}, "both know at once that the host has gone"


def refused(http: httpx.Client) -> str:
    """Why no session of the hosted environment is opened."""
    answer = http.post("/v1/sessions", json={"env": "count-here"})
    return answer.json()["error"]["code"]


@pytest.mark.usefixtures("sandbox")
def test_an_environment_that_is_registered_or_replaced_is_known_to_both_workers_at_once(two: Service) -> None:
    with two.client() as http, relax.Client(two.url, two.key) as client:
        for env, shown in ((hosted_envs.Echo, "shade"), (Count, "in process"), (hosted_envs.Echo, "shade")):
            client.upload_env(env, id="changing")
            for _ in range(2):
                told = http.post("/v1/sessions", json={"env": "changing"}).json()
                assert shown in str(told["observation"]), told
        client.remove_env("changing")
        codes = {http.post("/v1/sessions", json={"env": "changing"}).json()["error"]["code"] for _ in range(4)}
        assert codes == {"environment_not_found"}


def test_no_task_is_played_twice_though_sessions_live_in_both_workers(two: Service) -> None:
    with two.client() as client:
        opened = [client.post("/v1/sessions", json={"env": "tone-v0"}).json() for _ in range(12)]
        for session in opened:
            client.delete(f"/v1/sessions/{session['id']}")
    assert {worker(session) for session in opened} == {0, 1}
    tasks = [session["task_index"] for session in opened]
    assert tasks == list(range(tasks[0], tasks[0] + 12))


def test_rollouts_live_in_the_first_worker(two: Service) -> None:
    with two.client() as client:
        both = sessions(client)
        wanted = {"env": "tone-v0", "n": 2, "group_size": 2, "sampling": {"max_new_tokens": 1}}
        client.get(f"/v1/sessions/{both[1]['id']}")
        rollout = client.post("/v1/rollouts", json=wanted)
        assert rollout.status_code == 202, rollout.text
        path = f"/v1/rollouts/{rollout.json()['id']}"
        with client.stream("GET", f"{path}/events") as stream:
            kinds = [line for line in stream.iter_lines() if line.startswith("event: ")]
        assert kinds[-1] == "event: finished"
        client.get(f"/v1/sessions/{both[1]['id']}")
        assert client.get(path).json()["state"] == "completed"


def test_a_killed_worker_comes_back_and_the_other_goes_on(two: Service) -> None:
    with two.client() as client:
        kept, lost = sessions(client)
        assert ask(client, kept).status_code == ask(client, lost).status_code == 200
        process = workers(two)[1]
        process.kill()
        until(lambda: status(client, lost) == 503)
        assert ask(client, kept).status_code == 200, "the other one's sessions go on"
        assert worker(two.open()) == 0, "new ones are opened at the other"
        until(lambda: status(client, lost) == 404)
        error = ask(client, lost).json()["error"]
        assert error["code"] == "session_not_found" and "was killed or restarted" in error["message"]
        _, again = sessions(client)
        assert ask(client, again).status_code == ask(client, kept).status_code == 200
        assert client.post(f"/v1/sessions/{kept['id']}/finish").json()["status"] == "completed"
    assert "worker 1 ended (exit code -9); starting it again" in (two.folder / "serve.log").read_text()


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_worker_that_hangs_is_started_again(tmp_path: Path, engine: str) -> None:
    it = start(tmp_path / "service", "--workers", "2", "--engine", engine)
    hanging = workers(it)[1]
    with it.client() as client:
        kept, lost = sessions(client)
        hanging.suspend()
        until(lambda: gone(hanging), 2 * (LOOK_SECONDS + 2 * HUNG_SECONDS))
        assert ask(client, kept).status_code == 200, "the other one's sessions go on"
        until(lambda: status(client, lost) == 404)
        _, again = sessions(client)
        assert ask(client, again).status_code == 200
    it.stop()
    log = (it.folder / "serve.log").read_text()
    assert f"worker 1 has not answered for {2 * HUNG_SECONDS:g} s; ending it" in log


def test_sigterm_drains_all_workers(tmp_path: Path, engine: str) -> None:
    file, token = tmp_path / "token", "a-token-that-nobody-else-may-read"
    file.write_text(token)
    options = ("--engine", engine, "--engine-token-file", str(file), "--drain-seconds", "2")
    it = start(tmp_path / "service", "--workers", "2", *options)
    processes = workers(it)
    assert all(token not in f"{process.cmdline()} {process.environ()}" for process in processes)
    with it.client() as client:
        both = sessions(client)
        for session in both:
            assert ask(client, session).status_code == 200
        it.process.send_signal(signal.SIGTERM)
        until(lambda: client.get("/readyz").json() == {"ready": False, "reason": "draining"})
        assert client.post(f"/v1/sessions/{both[1]['id']}/finish").json()["status"] == "completed", "it may go on"
    began = time.monotonic()
    assert it.process.wait(60) == 0
    assert time.monotonic() - began < 2 + 5 + 2
    assert all(gone(process) for process in processes)
    log = (it.folder / "serve.log").read_text()
    assert "relax serve (worker 0): draining" in log and log.count("ended; everything is in") == 1
    assert log.count("ready at ") == 1


@pytest.mark.nightly
@pytest.mark.parametrize("number", [1, 2])
def test_an_engine_of_ours_that_is_killed_comes_back_and_nothing_is_left_when_the_first_process_is(
    tmp_path: Path, number: int
) -> None:
    it = start(tmp_path / "service", "--workers", str(number))
    engine = next(p for p in psutil.Process(it.process.pid).children() if "relax_server.engines.embedded" in p.cmdline())
    assert len(workers(it)) == (number if number > 1 else 0)
    with it.client() as client:
        opened = sessions(client, number)
        assert [ask(client, session).status_code for session in opened] == [200] * number
        engine.kill()
        assert [ask(client, session).status_code for session in opened] == [200] * number, "the calls wait for it"
    processes = psutil.Process(it.process.pid).children(recursive=True)
    it.process.kill()
    it.process.wait(30)
    until(lambda: all(gone(process) for process in processes))


def test_nothing_is_left_when_the_first_process_is_killed(tmp_path: Path, engine: str) -> None:
    it = start(tmp_path / "service", "--workers", "2", "--engine", engine)
    processes = workers(it)
    it.process.kill()
    it.process.wait(30)
    until(lambda: all(gone(process) for process in processes))


@pytest.mark.nightly
def test_a_second_signal_ends_all_at_once(tmp_path: Path, engine: str) -> None:
    it = start(tmp_path / "service", "--workers", "2", "--engine", engine, "--drain-seconds", "3600")
    processes = workers(it)
    it.open()
    with it.client() as client:
        it.process.send_signal(signal.SIGTERM)
        until(lambda: client.get("/readyz").json()["reason"] == "draining")
    it.process.send_signal(signal.SIGINT)
    assert it.process.wait(30) == 128 + signal.SIGINT
    until(lambda: all(gone(process) for process in processes))


def test_what_hinders_a_worker_is_told_and_nothing_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "relax_sdk.cli", "serve", "--workers", "2", "--port", "0", "--folder", str(tmp_path)]
    run = subprocess.run([*command, "--engine", "http://127.0.0.1:9"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 1 and "the engine http://127.0.0.1:9 does not answer" in run.stderr, run.stderr
    assert "Traceback" not in run.stderr and "ready at" not in run.stderr


@pytest.mark.parametrize("number", ["0", "-1", "65"])
def test_numbers_of_workers_that_are_refused(tmp_path: Path, number: str) -> None:
    from relax_server.api.settings import ServiceConfig

    from relax_sdk.errors import ConfigError

    with pytest.raises(ConfigError, match=f"workers = {number}; allowed: 1"):
        ServiceConfig(tmp_path, workers=int(number))

"""SIGTERM drains the service: what is under way may end, what is left is told why, and nothing durable is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from postgres_server import PostgresServer
from relax_server.journal import open_journal
from service_process import Service, start

import relax_sdk as relax

HELLO = [{"role": "user", "content": "hello"}]
ONE = {"sampling": {"max_new_tokens": 1}}


@pytest.fixture
def engine(service: Service) -> str:
    """URL of an engine that runs."""
    with service.client() as client:
        return client.get("/v1/models").json()["engines"][0]["url"]


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.02)


def begun(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def drain(it: Service, client: httpx.Client) -> None:
    """Tell it to end, and wait until it says so."""
    it.process.send_signal(signal.SIGTERM)
    until(lambda: client.get("/readyz").json() == {"ready": False, "reason": "draining"})


def test_open_sessions_may_end_and_those_that_do_not_are_told(tmp_path: Path, engine: str) -> None:
    it = start(tmp_path / "service", "--engine", engine, "--drain-seconds", "3")
    one, other = it.open(**ONE), it.open(**ONE)
    asked: list[httpx.Response] = []
    told: list[str] = []

    def ask() -> None:
        asked.append(httpx.post(other["base_url"] + "/chat/completions", json={"messages": HELLO}, timeout=60))

    def follow() -> None:
        with httpx.stream("GET", f"{it.url}/v1/sessions/{other['id']}/events", timeout=60) as stream:
            told.extend(stream.iter_lines())

    with it.client() as client:
        assert client.post(f"{one['base_url']}/chat/completions", json={"messages": HELLO}).status_code == 200
        client.post("/v1/pause")  # so that the other one's call is under way for ever
        threads = [begun(ask), begun(follow)]
        until(lambda: client.get(f"/v1/sessions/{other['id']}").json()["calls"] == 1)
        drain(it, client)
        assert client.get("/healthz").json() == {"status": "draining"}
        for path, body in (("/v1/sessions", {}), ("/v1/rollouts", {"env": "tone-v0", "n": 1})):
            refused = client.post(path, json=body)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
            assert refused.headers["Retry-After"]
        finished = client.post(f"/v1/sessions/{one['id']}/finish").json()
        assert finished["status"] == "completed", "an open session may go on"
    for thread in threads:
        thread.join(60)
    assert it.process.wait(60) == 0
    error = asked[0].json()["error"]
    assert asked[0].status_code == 400 and error["code"] == "episode_over" and "was shut down" in error["message"]
    kinds = [line[7:] for line in told if line.startswith("event: ")]
    assert kinds == ["opened", "paused", "draining", "finished"]
    assert '"cancelled"' in told[-2 if not told[-1] else -1] and "was shut down" in "".join(told)
    log = (it.folder / "serve.log").read_text()
    assert "draining: 2 sessions are open" in log and "cancelling 1 sessions" in log and "ended; everything is in" in log
    journal = open_journal(it.folder / "journal.db")
    assert journal.trajectory(one["trajectory_id"]).status is relax.Status.COMPLETED
    assert journal.trajectory(other["trajectory_id"]).status is relax.Status.CANCELLED
    journal.close()


def test_a_rollout_goes_on_after_an_orderly_restart(tmp_path: Path, engine: str) -> None:
    it = start(tmp_path / "service", "--engine", engine)
    with relax.Client(it.url) as client:
        rollout = client.rollout("tone-v0", n=300, group_size=4, **ONE)
        events = rollout.events()
        told = [next(events) for _ in range(6)]
        it.process.send_signal(signal.SIGTERM)
    assert it.process.wait(60) == 0
    it = start(tmp_path / "service", "--engine", engine)
    try:
        with relax.Client(it.url) as client:
            rest = list(client.get_rollout(rollout.id).events(after=told[-1].id))
            groups = [event.data["id"] for event in [*told, *rest] if event.kind == "group"]
            assert len(groups) == len(set(groups)) == 300
            assert client.get_rollout(rollout.id).state.counts["trajectories"] == 1200
    finally:
        it.stop()


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    it = start(tmp_path / "service", "--drain-seconds", "3600")
    children = psutil.Process(it.process.pid).children(recursive=True)
    assert children, "it has an engine of its own"
    it.open()
    with it.client() as client:
        drain(it, client)
    it.process.send_signal(signal.SIGINT)
    assert it.process.wait(60) == 128 + signal.SIGINT
    assert "ending at once" in (it.folder / "serve.log").read_text()
    until(lambda: all(not child.is_running() or child.status() == psutil.STATUS_ZOMBIE for child in children))


def test_whatever_hangs_it_ends_five_seconds_after_draining(tmp_path: Path, engine: str, postgres: PostgresServer) -> None:
    it = start(tmp_path / "service", "--engine", engine, "--journal", postgres.make(), "--drain-seconds", "0")
    session = it.open(**ONE)
    assert httpx.post(f"{session['base_url']}/chat/completions", json={"messages": HELLO}, timeout=60).status_code == 200
    with postgres.frozen():
        it.process.send_signal(signal.SIGTERM)
        assert it.process.wait(60) == 128 + signal.SIGTERM
    assert "not ended within 5 s; ending now" in (it.folder / "serve.log").read_text()


def test_idle_sessions_do_not_hold_it_up(tmp_path: Path, engine: str) -> None:
    it = start(tmp_path / "service", "--engine", engine, "--drain-seconds", "0")
    for _ in range(3):
        it.open()
    it.process.send_signal(signal.SIGTERM)
    assert it.process.wait(60) == 0
    log = (it.folder / "serve.log").read_text()
    assert "cancelling 3 sessions" in log and "not ended within" not in log


def test_seconds_below_zero_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "relax_sdk.cli", "serve", "--folder", str(tmp_path), "--drain-seconds", "-1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "drain_seconds = -1.0; allowed: 0 seconds or more" in done.stderr

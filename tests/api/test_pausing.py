"""Pause and resume, of the whole service and of one rollout."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_process import Service, start

import relax_sdk as relax

HELLO = [{"role": "user", "content": "hello"}]
ONE = {"sampling": {"max_new_tokens": 1}}
LIMIT, HELD = 3.0, 4.0
"""Seconds of a time limit, and for how long what it limits is held."""


@pytest.fixture
def idle(service: Service) -> Iterator[Service]:
    """The service, which goes on afterwards whatever a test did."""
    yield service
    with service.client() as client:
        client.post("/v1/resume")


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Ask until it is so; returns what it was."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.02)
    return found


def answered(client: httpx.Client) -> int | None:
    """Model calls that the engines have answered; None while one is under way."""
    engines = client.get("/v1/models").json()["engines"]
    return None if any(engine["running"] for engine in engines) else sum(engine["answered"] for engine in engines)


def settled(client: httpx.Client) -> int:
    """The same, when nothing is under way any more."""
    return until(lambda: (number := answered(client)) is not None and number + 1) - 1


def test_a_paused_service_holds_model_calls_and_times_none(idle: Service) -> None:
    limits = {"turn_timeout": LIMIT, "episode_timeout": LIMIT}
    session = idle.open(**ONE, limits=limits)
    got: list[httpx.Response] = []

    def ask() -> None:
        got.append(httpx.post(session["base_url"] + "/chat/completions", json={"messages": HELLO}, timeout=60))

    asking = threading.Thread(target=ask)
    with idle.client() as client:
        before = settled(client)
        assert client.post("/v1/pause").json() == {"status": "paused"} == client.post("/v1/pause").json()
        paused = time.monotonic()
        assert client.get("/v1/healthz").json() == {"status": "paused"}
        ready = client.get("/readyz")
        assert ready.status_code == 503 and ready.json() == {"ready": False, "reason": "paused"}
        asking.start()
        until(lambda: client.get(f"/v1/sessions/{session['id']}").json()["calls"] == 1)
        until(lambda: time.monotonic() > paused + HELD)
        assert answered(client) == before and not got
        assert client.post("/v1/resume").json() == {"status": "ok"}
        asking.join(60)
        assert got[0].status_code == 200, got[0].text
        assert client.post(f"/v1/sessions/{session['id']}/finish").json()["status"] == "completed"
        with httpx.stream("GET", f"{idle.url}/v1/sessions/{session['id']}/events", timeout=30) as stream:
            kinds = [line[7:] for line in stream.iter_lines() if line.startswith("event: ")]
    assert kinds == ["opened", "paused", "resumed", "turn", "finished"]


def test_a_call_that_is_held_ends_with_its_session(idle: Service) -> None:
    session = idle.open(**ONE)
    got: list[httpx.Response] = []

    def ask() -> None:
        got.append(httpx.post(session["base_url"] + "/chat/completions", json={"messages": HELLO}, timeout=60))

    asking = threading.Thread(target=ask)
    with idle.client() as client:
        client.post("/v1/pause")
        asking.start()
        until(lambda: client.get(f"/v1/sessions/{session['id']}").json()["calls"] == 1)
        assert client.delete(f"/v1/sessions/{session['id']}").json()["state"] == "cancelled"
    asking.join(60)
    assert got[0].status_code == 400 and got[0].json()["error"]["code"] == "episode_over"


def test_no_session_is_opened_while_the_service_is_paused(idle: Service) -> None:
    with idle.client() as client:
        client.post("/v1/pause")
        refused = client.post("/v1/sessions", json={})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "paused" and refused.headers["Retry-After"]
        client.post("/v1/resume")
        assert client.post("/v1/sessions", json={}).status_code == 201


def test_episodes_of_rollouts_begin_when_the_service_goes_on(idle: Service) -> None:
    with relax.Client(idle.url) as service, idle.client() as client:
        assert service.status() == "ok"
        first = service.rollout("tone-v0", n=300, group_size=4, **ONE)
        until(lambda: first.refresh().counts["done"] > 0)
        assert service.pause() == "paused" == service.status()
        calls = settled(client)
        held = service.rollout("tone-v0", n=2, limits={"episode_timeout": LIMIT}, **ONE)
        paused = time.monotonic()
        until(lambda: time.monotonic() > paused + HELD)
        assert answered(client) == calls and held.refresh().counts["done"] == 0
        assert service.resume() == "ok"
        assert held.wait().counts == {"groups": 2, "done": 2, "unusable": 0, "failed": 0, "trajectories": 2}
        events = list(first.events())
        assert first.refresh().counts["trajectories"] == 1200
    told = [(event.kind, event.data) for event in events if event.kind in ("paused", "resumed")]
    assert told == [("paused", {"by": "service"}), ("resumed", {"by": "service"})]


def test_an_episode_that_has_not_begun_takes_no_place(idle: Service) -> None:
    def read(name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    queued, places = 'relax_episode_states{state="queued"}', "relax_episodes_running"
    with relax.Client(idle.url) as service, idle.client() as client:
        service.pause()
        before, taken = read(queued), read(places)
        rollout = service.rollout("tone-v0", n=5, **ONE)
        until(lambda: read(queued) == before + 5)
        assert read(places) == taken
        service.resume()
        assert rollout.wait().counts["done"] == 5 and read(queued) == before


def test_one_rollout_is_paused_and_others_go_on(service: Service) -> None:
    with relax.Client(service.url) as client:
        one = client.rollout("tone-v0", n=300, group_size=4, **ONE)
        until(lambda: one.refresh().counts["done"] > 0)
        assert one.pause().state == "paused" == one.pause().state
        assert not one.state.over
        other = client.rollout("tone-v0", n=3, **ONE)
        assert other.wait().state == "completed" and one.refresh().state == "paused"
        assert one.state.counts["done"] < 300
        assert one.resume().state == "running"
        events = list(one.events())
        assert one.refresh().state == "completed" and one.state.counts["trajectories"] == 1200
        kinds = [event.kind for event in events if event.kind != "group"]
        assert kinds == ["queued", "running", "paused", "resumed", "finished"]
        with pytest.raises(relax.ServiceError, match=r"is over .completed") as caught:
            one.pause()
    assert caught.value.status == 409


async def test_the_same_in_asyncio(idle: Service) -> None:
    async with relax.AsyncClient(idle.url) as client:
        rollout = await client.rollout("tone-v0", n=20, **ONE)
        assert (await rollout.pause()).state == "paused"
        assert (await rollout.resume()).state == "running"
        assert (await rollout.wait()).counts["done"] == 20
        assert [await client.pause(), await client.status(), await client.resume()] == ["paused", "paused", "ok"]


def test_a_paused_rollout_stays_paused_when_the_service_is_killed(tmp_path: Path, service: Service) -> None:
    with service.client() as client:
        engine = client.get("/v1/models").json()["engines"][0]["url"]
    it = start(tmp_path / "service", "--engine", engine)
    with relax.Client(it.url) as client:
        rollout = client.rollout("tone-v0", n=100, group_size=4, **ONE)
        rollout.pause()
    it.process.send_signal(signal.SIGKILL)
    it.process.wait(30)
    it = start(tmp_path / "service", "--engine", engine)
    try:
        with relax.Client(it.url) as client, it.client() as plain:
            calls = settled(plain)
            again = client.get_rollout(rollout.id)
            assert again.state.state == "paused" and client.status() == "ok"
            assert client.rollout("tone-v0", n=1, **ONE).wait().state == "completed"
            assert settled(plain) == calls + 1 and again.refresh().state == "paused"
            again.resume()
            assert again.wait().counts["done"] == 100
    finally:
        it.stop()


def test_who_may_pause(locked: Service, service: Service) -> None:
    def key(**body: Any) -> str:
        with locked.client() as client:
            return client.post("/v1/keys", json={"name": "test"} | body).json()["secret"]

    mine, other = key(), key()
    with locked.client(mine) as client:
        for path in ("/v1/pause", "/v1/resume"):
            assert client.post(path).status_code == 403
        rollout = client.post("/v1/rollouts", json={"env": "tone-v0", "n": 500, "group_size": 4} | ONE).json()["id"]
        assert client.post(f"/v1/rollouts/{rollout}/pause").json()["state"] == "paused"
    with locked.client(other) as client:
        assert client.post(f"/v1/rollouts/{rollout}/resume").status_code == 404
    with locked.client("") as client:
        assert client.post("/v1/pause").status_code == 401
    with locked.client() as client:
        assert client.post(f"/v1/rollouts/{rollout}/resume").json()["state"] == "running", "an admin may"
        assert client.delete(f"/v1/rollouts/{rollout}").json()["state"] == "cancelled"
        assert client.post("/v1/pause").json() == {"status": "paused"}
        assert client.post("/v1/resume").json() == {"status": "ok"}
    with service.client() as client:
        refused = client.post("/v1/pause", headers={"Sec-Fetch-Site": "cross-site"})
        assert refused.status_code == 403 and client.get("/healthz").json() == {"status": "ok"}

"""A key that is revoked or expires ends what goes on under it: connections, streams, sessions, rollouts, hosts and runs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from relax_server.api.key_watch import LOCKED, LOOK_SECONDS, KeyWatch
from relax_server.api.keys import KNOWN_SECONDS, LOCAL, KeyRing
from relax_server.api.trainings.hub import REVOKED_SECONDS
from relax_server.journal.sql import SqlJournal
from sample_groups import ManualClock
from service_process import Service
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

import relax_sdk as relax

ONE = {"sampling": {"max_new_tokens": 1}}
HELLO = [{"role": "user", "content": "hello"}]
WITHIN = 5.0
"""Seconds in which a key ends, as the documentation says."""


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[KeyRing]:
    journal = SqlJournal(tmp_path / "journal.db")
    yield KeyRing(journal, ManualClock())
    journal.close()


async def ask(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


async def open_to_all() -> bool:
    return False


async def closed() -> bool:
    return True


def test_the_parts_of_the_promise_add_up() -> None:
    assert KNOWN_SECONDS + LOOK_SECONDS < WITHIN and LOOK_SECONDS + REVOKED_SECONDS < WITHIN


async def test_each_use_of_a_key_that_ended_is_told_once(ring: KeyRing) -> None:
    watch, told = KeyWatch(ring, ask, open_to_all), list[str]()
    (_, mine), (_, other), (_, short) = ring.create("mine"), ring.create("other"), ring.create("short", lifetime=9.0)
    for number in range(100):
        watch.use(mine.id, lambda why, n=number: told.append(f"{n} {why}"))
    watch.use(other.id, told.append)
    watch.use(short.id, told.append)
    watch.use(None, told.append)
    watch.use(mine.id, told.append)()
    await watch.look()
    assert not told
    ring.revoke(mine.id)
    await watch.look()
    assert sorted(told) == sorted(f"{n} key 'mine' was revoked" for n in range(100))
    ring._clock.advance(10)  # type: ignore[attr-defined]
    await watch.look()
    await watch.look()
    assert told[100:] == ["key 'short' has expired"]


async def test_one_that_fails_keeps_no_other_from_being_told(ring: KeyRing) -> None:
    watch, told = KeyWatch(ring, ask, open_to_all), list[str]()
    _, key = ring.create("a")

    def fails(why: str) -> None:
        raise ValueError(why)

    watch.use(key.id, told.append)
    watch.use(key.id, fails)
    ring.revoke(key.id)
    await watch.look()
    assert told == ["key 'a' was revoked"]


async def test_who_needs_no_key_is_told_of_the_first_one(ring: KeyRing) -> None:
    for locked, expected in ((open_to_all, []), (closed, [LOCKED])):
        watch, told = KeyWatch(ring, ask, locked), list[str]()
        watch.use(LOCAL.id, told.append)
        await watch.look()
        assert told == expected


def made(service: Service, **body: Any) -> tuple[str, str]:
    """Secret and id of a new key."""
    with service.client() as client:
        key = client.post("/v1/keys", json={"name": "ending"} | body).json()
    return key["secret"], key["id"]


def revoked_by_command(service: Service, id: str) -> None:
    command = [sys.executable, "-m", "relax_sdk.cli", "keys", "revoke", id, "--folder", str(service.folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def revoked_over_http(service: Service, id: str) -> None:
    with service.client() as client:
        assert client.delete(f"/v1/keys/{id}").status_code == 200


def socket_of(service: Service, secret: str) -> ClientConnection:
    url = service.url.replace("http", "ws") + "/v1/sessions/ws"
    return connect(url, additional_headers={"Authorization": f"Bearer {secret}"})


def told(socket: ClientConnection, **message: Any) -> Any:
    socket.send(json.dumps({"id": 1} | message))
    return json.loads(socket.recv(timeout=60))


class Following(threading.Thread):
    """Follows a stream of events to its end."""

    def __init__(self, url: str, secret: str) -> None:
        super().__init__(daemon=True)
        self.url, self.secret, self.events, self.begun = url, secret, list[tuple[str, str]](), threading.Event()
        self.start()
        assert self.begun.wait(60)

    def run(self) -> None:
        kind = ""
        with httpx.stream("GET", self.url, headers={"Authorization": f"Bearer {self.secret}"}, timeout=60) as stream:
            for line in stream.iter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    self.events.append((kind, value))
                    self.begun.set()

    def last(self) -> tuple[str, str]:
        self.join(30)
        assert not self.is_alive(), "the stream goes on"
        return self.events[-1]


class Waiting(relax.Env):
    """Hosted here."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return "go", {}

    def step(self, action: relax.AssistantMessage) -> Any:
        return None, 1.0, True, False, {}


@pytest.mark.parametrize("revoke", [revoked_over_http, revoked_by_command])
def test_what_goes_on_under_a_key_ends_with_it(locked: Service, revoke: Callable[[Service, str], None]) -> None:
    secret, id = made(locked)
    with socket_of(locked, secret) as socket, locked.client(secret) as client:
        over_socket = told(socket, op="open", **ONE)["result"]
        session = client.post("/v1/sessions", json=ONE).json()
        ended = client.post("/v1/sessions", json=ONE).json()
        asked = httpx.post(f"{ended['base_url']}/chat/completions", json={"messages": HELLO}, timeout=60, headers=bearer(ended))
        assert asked.status_code == 200 and client.post(f"/v1/sessions/{ended['id']}/finish").status_code == 200
        rollout = client.post("/v1/rollouts", json={"env": "tone-v0", "n": 2}).json()["id"]
        paused = client.post("/v1/rollouts", json={"env": "tone-v0", "n": 900, "group_size": 64} | ONE).json()["id"]
        assert client.post(f"/v1/rollouts/{paused}/pause").json()["state"] == "paused"
        streams = [Following(f"{locked.url}/v1/rollouts/{paused}/events", secret)]
        streams += [Following(f"{locked.url}/v1/sessions/{session['id']}/events", session["key"])]
        hosting = relax.host(Waiting, locked.url, secret, id=f"waiting-{id[-6:]}")

        revoke(locked, id)

        with pytest.raises(ConnectionClosed) as closing:
            while True:
                socket.recv(timeout=30)
        assert closing.value.rcvd is not None and closing.value.rcvd.code == 4401
        assert "key 'ending' was revoked" in closing.value.rcvd.reason
        for stream in streams:
            kind, data = stream.last()
            assert kind in ("finished", "revoked") and ("was revoked" in data or "cancelled" in data)
        with pytest.raises(relax.ServiceError):
            hosting.wait(30)
        for one in (session, ended, over_socket):
            url = f"{locked.url}/v1/sessions/{one['id']}"
            refused = [httpx.get(url, headers=bearer(one)), httpx.post(f"{url}/finish", headers=bearer(one))]
            refused += [httpx.post(f"{one['base_url']}/chat/completions", json={"messages": HELLO}, headers=bearer(one))]
            path = f"{locked.url}/v1/openai/v1/chat/completions"
            refused += [httpx.post(path, json={"messages": HELLO}, headers=bearer(one))]
            for answer in refused:
                assert answer.status_code == 401 and "key 'ending' was revoked" in answer.json()["error"]["message"]
    with locked.client() as admin:
        for one in (session, over_socket):
            state = until(lambda id=one["id"]: ended_state(admin, f"/v1/sessions/{id}"))
            assert state["state"] == "cancelled" and "key 'ending' was revoked" in state["error"]
        state = until(lambda: ended_state(admin, f"/v1/rollouts/{paused}"))
        assert state["state"] == "cancelled" and state["error"] == "key 'ending' was revoked"
        assert until(lambda: ended_state(admin, f"/v1/rollouts/{rollout}"))["state"] in ("completed", "cancelled")
    with locked.client(secret) as client:
        assert client.get("/v1/envs").status_code == 401


def bearer(session: dict[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {session['key']}"}


def ended_state(client: httpx.Client, path: str) -> dict[str, Any] | None:
    body = client.get(path).json()
    return body if body["state"] in ("completed", "cancelled", "failed", "truncated") else None


def until(found: Callable[[], Any], seconds: float = 30.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.05)
    return value


def test_a_connection_ends_when_its_key_expires(locked: Service) -> None:
    secret, _ = made(locked, lifetime=2.0)
    with socket_of(locked, secret) as socket:
        with pytest.raises(ConnectionClosed) as closing:
            socket.recv(timeout=30)
        assert closing.value.rcvd is not None and "key 'ending' has expired" in closing.value.rcvd.reason


def test_a_stream_of_another_s_session_ends_with_the_key_that_follows(locked: Service) -> None:
    secret, id = made(locked, rights=["admin"])
    session = locked.open(**ONE)
    stream = Following(f"{locked.url}/v1/sessions/{session['id']}/events", secret)
    revoked_over_http(locked, id)
    kind, data = stream.last()
    assert kind == "revoked" and json.loads(data) == {"error": "key 'ending' was revoked"}
    with locked.client() as admin:
        assert admin.get(f"/v1/sessions/{session['id']}").json()["state"] == "running"
        assert admin.delete(f"/v1/sessions/{session['id']}").status_code == 200


@pytest.mark.nightly
def test_training_runs_end_with_their_key(locked: Service) -> None:
    secret, id = made(locked)
    config = {"steps": 400, "warmup": {"steps": 2}, "rollout": {"groups_per_step": 2, "group_size": 2}} | ONE
    with locked.client(secret) as client:
        ids = [client.post("/v1/runs", json={"env": "tone-v0", "config": config}).json()["id"] for _ in range(2)]
        until(lambda: client.get(f"/v1/runs/{ids[0]}").json()["step"] >= 1, 180)
        stream = Following(f"{locked.url}/v1/runs/{ids[0]}/events", secret)
    revoked_by_command(locked, id)
    with locked.client() as admin:
        for run in ids:
            state = until(lambda run=run: ended_state(admin, f"/v1/runs/{run}"), 60)
            assert state["state"] == "cancelled" and state["error"] == "key 'ending' was revoked"
        assert stream.last()[0] in ("finished", "revoked")

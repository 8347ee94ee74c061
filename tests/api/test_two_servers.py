"""Two servers on one PostgreSQL: each sees what the other does, and when one is killed the other goes on with its rollouts."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from postgres_server import PostgresServer
from relax_server.api.identity import Identity
from relax_server.journal import claims, open_journal
from relax_server.journal.sql import SqlJournal
from service_process import Service, start

import relax_sdk as relax

HELLO = [{"role": "user", "content": "hello"}]
ONE = {"sampling": {"max_new_tokens": 1}}
GROUPS, SIZE = 1500, 2


@pytest.fixture
def engine(service: Service) -> str:
    with service.client() as client:
        return client.get("/v1/models").json()["engines"][0]["url"]


@pytest.fixture
def journal(postgres: PostgresServer) -> Iterator[SqlJournal]:
    it = open_journal(postgres.make())
    assert isinstance(it, SqlJournal)
    yield it
    it.close()


@pytest.fixture
def serve(tmp_path: Path, journal: SqlJournal, engine: str) -> Iterator[Callable[[str], Service]]:
    """`serve(name)` starts a server with a folder of that name."""
    started: list[Service] = []

    def begin(name: str) -> Service:
        options = ("--engine", engine, "--journal", str(journal.path), "--drain-seconds", "0")
        started.append(start(tmp_path / name, *options))
        return started[-1]

    yield begin
    for it in started:
        if it.process.poll() is None:
            it.stop()


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.05)


def player(journal: SqlJournal, rollout: str) -> str | None:
    """Name of the server that plays a rollout."""
    with journal.reading("see who plays") as connection:
        claim = claims.current(connection, f"rollout/{rollout}")
    return claim.holder.id if claim is not None else None


def finish(session: dict[str, Any], url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/sessions/{session['id']}/finish", timeout=60)


def ask(session: dict[str, Any], url: str) -> httpx.Response:
    path = f"/v1/sessions/{session['id']}/openai/v1/chat/completions"
    return httpx.post(f"{url}{path}", json={"messages": HELLO}, timeout=60)


def test_one_is_killed_and_the_other_goes_on(serve: Callable[[str], Service], journal: SqlJournal) -> None:
    one = serve("one")
    done, cut = one.open(**ONE), one.open(**ONE)
    assert ask(done, one.url).status_code == ask(cut, one.url).status_code == 200
    assert finish(done, one.url).status_code == 200
    other = None
    with relax.Client(one.url) as client:
        rollout = client.rollout("tone-v0", n=GROUPS, group_size=SIZE, idempotency_key="once", **ONE)
        held = client.rollout("tone-v0", n=2, group_size=SIZE, **ONE)
        held.pause()
        events = rollout.events()
        told = [next(events) for _ in range(6)]
        other = serve("other")
        assert httpx.get(f"{other.url}/readyz", timeout=60).status_code == 200  # so it has looked for what it may play
        assert player(journal, rollout.id) == player(journal, held.id) == (one.folder / "server.id").read_text()
    with relax.Client(other.url) as client:
        seen = client.get_rollout(rollout.id).events()
        assert [next(seen) for _ in range(6)] == told, "what one tells the other tells too"
        one.process.send_signal(signal.SIGKILL)
        one.process.wait(30)

        for refused in (ask(cut, other.url), finish(cut, other.url), ask(done, other.url)):
            error = refused.json()["error"]
            assert refused.status_code == 404 and error["code"] == "session_not_found"
            assert "not opened at this server, or that was killed" in error["message"]
        assert client.trajectory(done["trajectory_id"]).status is relax.Status.COMPLETED

        rest = list(seen)
        groups = Counter(event.data["id"] for event in [*told, *rest] if event.kind == "group")
        assert len(groups) == GROUPS and set(groups.values()) == {1} and rest[-1].kind == "finished"
        state = client.get_rollout(rollout.id).refresh()
        whole = {"groups": GROUPS, "done": GROUPS, "unusable": 0, "failed": 0, "trajectories": GROUPS * SIZE}
        assert (state.state, state.counts) == ("completed", whole)
        assert player(journal, rollout.id) is None
        again = client.rollout("tone-v0", n=GROUPS, group_size=SIZE, idempotency_key="once", **ONE)
        assert again.id == rollout.id, "submitting it again at the other server changes nothing"

        paused = client.get_rollout(held.id)
        assert paused.state.state == "paused" and paused.resume().state == "running"
        assert paused.wait().counts["trajectories"] == 2 * SIZE
    rows = journal.trajectories(rollout.id, limit=10 * GROUPS)
    assert len(rows) == len({row.id for row in rows}) == GROUPS * SIZE


@pytest.mark.nightly
def test_a_server_that_is_started_again_goes_on_with_its_own(serve: Callable[[str], Service], journal: SqlJournal) -> None:
    one = serve("one")
    with relax.Client(one.url) as client:
        rollout = client.rollout("tone-v0", n=300, group_size=SIZE, **ONE)
        told = [next(events := rollout.events())] + [next(events) for _ in range(5)]
    name = player(journal, rollout.id)
    one.process.send_signal(signal.SIGKILL)
    one.process.wait(30)
    again = serve("one")
    with relax.Client(again.url) as client:
        assert player(journal, rollout.id) == name
        rest = list(client.get_rollout(rollout.id).events(after=told[-1].id))
        groups = Counter(event.data["id"] for event in [*told, *rest] if event.kind == "group")
        assert len(groups) == 300 and set(groups.values()) == {1}


@pytest.mark.nightly
def test_a_rollout_is_paused_and_ended_at_another_server_than_its_own(serve: Callable[[str], Service]) -> None:
    one, other = serve("one"), serve("other")
    with relax.Client(one.url) as here, relax.Client(other.url) as there:
        rollout = here.rollout("tone-v0", n=2000, group_size=8, **ONE)
        away = there.get_rollout(rollout.id)
        assert away.pause().state == "paused"
        until(lambda: rollout.refresh().state == "paused")
        assert away.resume().state == "running"
        until(lambda: rollout.refresh().state == "running")
        assert away.cancel().state == "cancelled"
        assert list(rollout.events())[-1].data["state"] == "cancelled"
        with one.client() as client:
            until(lambda: "\nrelax_rollouts_playing 0.0" in client.get("/metrics").text)
        assert rollout.refresh().state == "cancelled"


def test_a_name_is_one_server_s_at_a_time(tmp_path: Path) -> None:
    one = Identity(tmp_path)
    other = Identity(tmp_path)
    assert one.id != other.id
    one.close()
    assert Identity(tmp_path).id == one.id

"""Events of what ended long ago are pruned, and no others."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from relax_server.api.retention import BATCH
from relax_server.journal import open_journal, schema
from relax_server.journal.sql import SqlJournal
from service_process import Service, start
from sqlalchemy import func, insert, select

DAY = 86_400.0
LONG = 2 * BATCH + 300
"""Groups of a rollout, more than are deleted at once."""
COUNTS = {"groups": 3, "done": 3, "unusable": 0, "failed": 0, "trajectories": 3}


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty journal."""
    return str(tmp_path / "journal.db") if request.param == "sqlite" else request.getfixturevalue("postgres").make()


@pytest.fixture
def journal(url: str) -> Iterator[SqlJournal]:
    it = open_journal(url)
    assert isinstance(it, SqlJournal)
    yield it
    it.close()


def add(journal: SqlJournal, topic: str, *events: tuple[str, float]) -> None:
    """Events of a topic: kind, and how many days ago."""
    rows = [{"topic": topic, "kind": kind, "data": {}, "created_at": time.time() - days * DAY} for kind, days in events]
    with journal.writing("add events") as connection:
        connection.execute(insert(schema.events), rows)


def add_rollout(journal: SqlJournal, id: str, state: str, ended: float | None) -> None:
    request = {"env": "tone-v0", "n": 3}
    now = time.time()
    row = dict(id=id, key="local", request=request, state=state, counts=COUNTS, created_at=now - 41 * DAY)
    with journal.writing("add a rollout") as connection:
        connection.execute(insert(schema.rollouts).values(row | {"ended_at": now - ended * DAY if ended else None}))


def counts(journal: SqlJournal) -> dict[str, int]:
    """Events by topic."""
    e = schema.events.c
    with journal.reading("count events") as connection:
        return dict(connection.execute(select(e.topic, func.count()).group_by(e.topic)).tuples().all())


def test_what_ended_long_ago_is_pruned_and_nothing_else(
    tmp_path: Path, url: str, journal: SqlJournal, service: Service
) -> None:
    add_rollout(journal, "r_done", "completed", 40)
    add_rollout(journal, "r_untold", "completed", 40)
    add_rollout(journal, "r_fresh", "completed", 29)
    add_rollout(journal, "r_paused", "paused", None)
    add(journal, "session/s_recent", ("opened", 41), ("turn", 2), ("finished", 1))
    add(journal, "session/s_old", ("opened", 41), ("turn", 40), ("finished", 40))
    add(journal, "session/s_killed", ("opened", 41), ("turn", 40))
    add(journal, "session/s_long", ("opened", 41), ("open", 1))
    add(journal, "rollout/r_done", ("queued", 41), *[("group", 40)] * LONG, ("finished", 40))
    add(journal, "rollout/r_untold", ("queued", 41), ("group", 40))
    add(journal, "rollout/r_fresh", ("queued", 41), ("finished", 29))
    add(journal, "rollout/r_paused", ("queued", 41), ("paused", 40))
    add(journal, "something/new", ("begun", 40))
    left = counts(journal)
    gone = {"session/s_old", "session/s_killed", "rollout/r_done", "rollout/r_untold"}
    with service.client() as client:
        engine = client.get("/v1/models").json()["engines"][0]["url"]
    it = start(tmp_path / "service", "--engine", engine, "--journal", url)
    try:
        end = time.monotonic() + 60
        while "pruned" not in (log := (it.folder / "serve.log").read_text()):
            assert time.monotonic() < end, log
            time.sleep(0.1)
        assert counts(journal) == {topic: number for topic, number in left.items() if topic not in gone}
        assert f"pruned {sum(left[topic] for topic in gone)} events of what ended more than 30 days ago" in log
        assert [kind for kind, _ in follow(it, "r_fresh")] == ["queued", "finished"]
        assert follow(it, "r_done") == [("finished", {"state": "completed", "counts": COUNTS, "error": None})]
    finally:
        it.stop()


def follow(it: Service, id: str) -> list[tuple[str, dict[str, Any]]]:
    """Kind and data of a rollout's events, until the stream ends."""
    seen, kind = [], ""
    with httpx.stream("GET", f"{it.url}/v1/rollouts/{id}/events", timeout=60) as stream:
        for line in stream.iter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                seen.append((kind, json.loads(value)))
    return seen


def test_a_stream_that_is_opened_behind_the_end_ends(service: Service) -> None:
    with service.client() as client:
        rollout = client.post("/v1/rollouts", json={"env": "tone-v0", "n": 1, "sampling": {"max_new_tokens": 1}}).json()["id"]
    assert follow(service, rollout)[-1][0] == "finished"
    headers = {"Last-Event-ID": "999999999999"}
    with httpx.stream("GET", f"{service.url}/v1/rollouts/{rollout}/events", headers=headers, timeout=60) as stream:
        lines = list(stream.iter_lines())
    assert lines.count("event: finished") == 1 and "id: 999999999999" in lines


def test_days_must_be_above_zero(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "relax_sdk.cli", "serve", "--folder", str(tmp_path), "--keep-events-days", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "keep_events_days = 0.0; allowed: above 0 days" in done.stderr

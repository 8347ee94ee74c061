"""Two services in one process on one journal: what one leaves the other goes on with, and what one learns the other knows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from relax_server.api import event_stream, holding
from relax_server.api.environments.source import EnvSource
from relax_server.api.environments.store import EnvStore
from relax_server.api.events import EventLog
from relax_server.api.holding import Holding
from relax_server.api.keys import LOCAL, KeyRing
from relax_server.api.rollout_store import Rollout, RolloutStore
from relax_server.api.trainings.store import TrainingStore
from relax_server.models.processor import Processor
from service_inside import InsideService, service_inside

from relax_sdk.errors import ClaimLost, JournalError
from relax_sdk.hosting.protocol import Description

GROUPS = 12
BODY = {"env": "tone-v0", "n": GROUPS, "group_size": 1, "sampling": {"max_new_tokens": 4}}


@pytest.fixture(params=["sqlite", "postgres"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "journal.db") if request.param == "sqlite" else request.getfixturevalue("postgres").make()


@pytest.fixture
async def two(
    processor: Processor, tmp_path: Path, journal: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[InsideService, InsideService]]:
    monkeypatch.setattr(holding, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(holding, "LAPSE_SECONDS", 1.0)
    async with (
        service_inside(processor, tmp_path / "one", journal, name="one") as one,
        service_inside(processor, tmp_path / "other", journal, name="other") as other,
    ):
        yield one, other


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def state_of(service: InsideService, path: str) -> str:
    return (await service.http.get(path)).json()["state"]


async def stopped(service: InsideService) -> None:
    """It plays no rollout any more."""
    async with asyncio.timeout(60):
        while "\nrelax_rollouts_playing 0.0" not in (await service.http.get("/metrics")).text:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def silence(service: InsideService, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives no sign of life from now on, and goes on with everything else."""
    renew, name = RolloutStore.renew, service.core.identity.id

    def fails(self: RolloutStore, playing: Sequence[Rollout]) -> dict[str, str]:
        if self.holding.held("").holder == name:
            raise JournalError("the database is far away")
        return renew(self, playing)

    monkeypatch.setattr(RolloutStore, "renew", fails)


async def test_a_service_that_hung_finds_its_rollout_played_and_stores_nothing_more(
    two: tuple[InsideService, InsideService], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    one.engine.hold.clear()
    rollout = (await one.http.post("/v1/rollouts", json=BODY)).json()
    path = f"/v1/rollouts/{rollout['id']}"
    await until(lambda: len(one.engine.running) == GROUPS)
    silence(one, monkeypatch)
    async with asyncio.timeout(60):
        while await state_of(other, path) != "completed":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    one.engine.hold.set()
    await stopped(one)
    assert len(other.core.journal.trajectories(rollout["id"], limit=100)) == GROUPS
    await stopped(other)  # which has said then that it is over
    await one.core.events.flush()
    await other.core.events.flush()
    told = Counter(e.data.get("id", e.kind) for e in await other.core.events.after(f"rollout/{rollout['id']}", 0))
    assert len(told) == GROUPS + 3 and told.pop("running") == 2 and set(told.values()) == {1}


async def test_a_rollout_is_cancelled_at_the_other_service(two: tuple[InsideService, InsideService]) -> None:
    one, other = two
    one.engine.hold.clear()
    id = (await one.http.post("/v1/rollouts", json=BODY)).json()["id"]
    await until(lambda: len(one.engine.running) == GROUPS)
    assert (await other.http.delete(f"/v1/rollouts/{id}")).json()["state"] == "cancelled"
    one.engine.hold.set()  # what comes back now is too late
    await stopped(one)
    assert await state_of(one, f"/v1/rollouts/{id}") == "cancelled"
    assert one.core.journal.trajectories(id) == []


async def test_who_follows_a_rollout_is_told_of_an_end_that_its_service_did_not_live_to_tell(
    two: tuple[InsideService, InsideService], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "LOOK_SECONDS", 0.1)
    one, other = two
    add_held = EventLog.add_held

    def dies_first(self: EventLog, held: Any, topic: str, kind: str, **data: Any) -> None:
        if kind != "finished":
            add_held(self, held, topic, kind, **data)

    monkeypatch.setattr(EventLog, "add_held", dies_first)
    id = (await one.http.post("/v1/rollouts", json=BODY)).json()["id"]
    told = (await other.http.get(f"/v1/rollouts/{id}/events", timeout=60)).text  # ends with `finished` only
    assert told.count("event: group") == GROUPS and told.count("event: finished") == 1
    assert '"state":"completed"' in told.replace(": ", ":").partition("event:finished")[2]


async def test_what_is_registered_at_one_is_known_and_listed_at_the_other(two: tuple[InsideService, InsideService]) -> None:
    one, other = two
    row = dict(
        id="theirs-v0", key="local", created_at=1.0, source=msgspec.msgpack.encode(EnvSource(id="theirs-v0", kind="import"))
    )
    row["description"] = msgspec.msgpack.encode(Description(id="theirs-v0"))

    async def listed() -> set[str]:
        return {env["id"] for env in (await other.http.get("/v1/envs")).json()["envs"] if env["kind"] != "installed"}

    await EnvStore(one.core.journal, one.core.database).write(row, LOCAL)
    assert await listed() == {"theirs-v0"} and await one.core.envs.knows("theirs-v0")
    await one.core.envs.remove("theirs-v0", LOCAL)
    assert await listed() == set()


async def test_a_session_s_id_and_key_say_where_it_is_and_the_other_service_says_that_it_is_not_there(
    two: tuple[InsideService, InsideService],
) -> None:
    one, other = two
    session = await one.played()
    assert session["id"].endswith("~one") and session["key"].endswith("~one")
    missing = await other.finish(session)
    assert missing.status_code == 404 and "not opened at this server, or that was killed" in missing.json()["error"]["message"]
    KeyRing(other.core.journal).create("anybody", ["run"])
    other.core.locked = True
    refused = await other.http.get(f"/v1/sessions/{session['id']}", headers={"Authorization": f"Bearer {session['key']}"})
    assert refused.status_code == 401 and "no session has this key: it was not opened" in refused.json()["error"]["message"]


async def test_a_key_that_is_revoked_at_one_ends_its_session_and_its_rollout_at_the_other(
    two: tuple[InsideService, InsideService],
) -> None:
    one, other = two
    admin = {"Authorization": f"Bearer {KeyRing(one.core.journal).create('root', ['admin'])[0]}"}
    secret, key = KeyRing(one.core.journal).create("anybody", ["run"])
    mine = {"Authorization": f"Bearer {secret}"}
    one.core.locked = other.core.locked = True
    one.engine.hold.clear()
    session = (await one.http.post("/v1/sessions", json={}, headers=mine)).json()
    rollout = (await one.http.post("/v1/rollouts", json=BODY, headers=mine)).json()
    path = f"/v1/rollouts/{rollout['id']}"
    await until(lambda: len(one.engine.running) == GROUPS)
    assert (await other.http.delete(f"/v1/keys/{key.id}", headers=admin)).status_code == 200
    await stopped(one)
    async with asyncio.timeout(60):
        while (ended := (await other.http.get(path, headers=admin)).json())["state"] != "cancelled":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert "revoked" in ended["error"]
    await until(lambda: one.hub.open_count == 0)
    refused = await one.finish(session)
    assert refused.status_code == 401


async def test_a_training_run_is_cancelled_at_the_other_service_which_says_where_its_files_are(
    two: tuple[InsideService, InsideService],
) -> None:
    one, other = two
    store = TrainingStore(one.core.journal, one.core.identity.id, Holding("training", one.core.holder))
    row = dict(
        id="t_1", key=LOCAL.id, idempotency_key=None, step=7, request={"env": "tone-v0"}, state="running", created_at=1.0
    )
    training, _ = await one.core.ask(store.insert, row, LOCAL)
    assert await state_of(other, "/v1/runs/t_1") == "running"
    files = await other.http.get("/v1/runs/t_1/files")
    assert files.status_code == 409 and one.core.identity.id in files.json()["error"]["message"]
    assert (await other.http.delete("/v1/runs/t_1")).json()["state"] == "cancelled"
    training.state = "completed"
    with pytest.raises(ClaimLost):
        await one.core.ask(store.note, training)
    await other.core.events.flush()
    assert [e.data["state"] for e in await one.core.events.after("run/t_1", 0)] == ["cancelled"]
    again = await other.http.post("/v1/runs/t_1/resume")
    assert again.status_code == 409 and again.json()["error"]["code"] == "elsewhere"

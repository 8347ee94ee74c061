"""What several services on one journal carry out: each thing by one of them, and by another when that one is gone."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from relax_server.api.events import EventLog
from relax_server.api.holding import BEAT_SECONDS, LAPSE_SECONDS, Holding
from relax_server.api.keys import KeyRing
from relax_server.api.rollout_store import Rollout, RolloutStore
from relax_server.api.trainings.store import TrainingStore
from relax_server.gateway.errors import ApiError
from relax_server.journal import open_journal
from relax_server.journal.sql import SqlJournal
from relax_server.rollout.threads import CallThreads
from sample_groups import ManualClock, make_group

from relax_sdk.errors import ClaimLost
from relax_sdk.run_lock import Holder, born

MODEL = "relax/tiny-omni"
ELSEWHERE = Holder(4711, "vm7", "elsewhere", born=1, since=1000.0)
"""A service on another machine, of which nothing is known but what the journal says."""


@pytest.fixture(params=["sqlite", "postgres"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlJournal]:
    where = tmp_path / "journal.db" if request.param == "sqlite" else request.getfixturevalue("postgres").make()
    it = open_journal(where)
    assert isinstance(it, SqlJournal)
    yield it
    it.close()


Service = Callable[..., RolloutStore]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def service(journal: SqlJournal, clock: ManualClock) -> Service:
    """`service(name, behind=…)`: one more service, whose clock of the wall is so many seconds behind."""

    def make(name: str, behind: float = 0.0, model: str = MODEL, holder: Holder = ELSEWHERE) -> RolloutStore:
        holding = Holding("rollout", dataclasses.replace(holder, id=name), clock)
        return RolloutStore(journal, holding, model, lambda: time.time() - behind)

    return make


def submit(store: RolloutStore, id: str = "r_1") -> Rollout:
    row: dict[str, Any] = dict(id=id, key="local", idempotency_key=None, request={"env": "tone-v0"}, state="queued")
    return store.insert(row | dict(counts={"groups": 3, "done": 0}, created_at=time.time()), most=100)[0]


def test_a_rollout_changes_hands_when_its_service_gives_no_sign_of_life(service: Service, clock: ManualClock) -> None:
    one, other = service("one"), service("other", behind=-3600.0)
    rollout = submit(one)
    for _ in range(8):
        assert other.free() == [] and other.take([rollout.id]) == [], "whatever the clocks of the two machines say"
        clock.now += BEAT_SECONDS
        assert one.renew([rollout]) == {"r_1": "queued"}
    assert other.free() == []
    clock.now += LAPSE_SECONDS
    assert other.free() == [("r_1", "tone-v0", False)]
    assert [taken.id for taken in other.take(["r_1"])] == ["r_1"]
    assert one.renew([rollout]) == {} and one.take(["r_1"]) == []
    assert other.renew([rollout]) == {"r_1": "queued"}


def test_a_service_that_could_not_look_takes_nothing_for_dead(service: Service, clock: ManualClock) -> None:
    one, other = service("one"), service("other")
    submit(one)
    assert other.free() == []
    clock.now += 10 * LAPSE_SECONDS  # the database was down for both
    assert other.free() == [] and other.take(["r_1"]) == []


def test_a_sign_of_life_between_the_look_and_the_taking_is_seen(service: Service, clock: ManualClock) -> None:
    one, other = service("one"), service("other")
    rollout = submit(one)
    other.free()
    clock.now += LAPSE_SECONDS
    assert other.free() != []
    assert one.renew([rollout]) == {"r_1": "queued"}
    assert other.take(["r_1"]) == []


def test_only_one_of_two_takes_what_a_third_has_left(service: Service, clock: ManualClock) -> None:
    submit(service("one"))
    others = [service("other"), service("another")]
    for other in others:
        other.free()
    clock.now += LAPSE_SECONDS
    assert all(other.free() for other in others)
    assert [len(other.take(["r_1"])) for other in others] == [1, 0]


def test_what_a_service_let_go_or_had_in_an_earlier_life_is_free_at_once(service: Service) -> None:
    one, other = service("one"), service("other")
    submit(one)
    assert one.free() == [], "it was just submitted, and is not played yet"
    again = service("one", holder=dataclasses.replace(ELSEWHERE, since=2000.0))
    assert again.free() == [("r_1", "tone-v0", True)], "started again in its folder"
    one.release()
    assert service("third", model="another").free() == [], "a model that it does not serve"
    assert other.free() == [("r_1", "tone-v0", False)]


def test_what_a_killed_process_of_this_machine_had_is_free_at_once(service: Service) -> None:
    here, process = Holder.here(), subprocess.Popen(["sleep", "60"])
    submit(service("one", holder=dataclasses.replace(here, pid=process.pid, born=born(process.pid) or 0)))
    other = service("other", holder=here)
    assert other.free() == []
    process.kill()
    process.wait()
    assert other.free() == [("r_1", "tone-v0", False)] and other.take(["r_1"])


def taken_over(one: RolloutStore, other: RolloutStore, clock: ManualClock) -> None:
    other.free()
    clock.now += LAPSE_SECONDS
    other.free()
    assert other.take(["r_1"])


def cancelled(one: RolloutStore, other: RolloutStore, clock: ManualClock) -> None:
    assert other.switch("r_1", "cancelled").state == "cancelled"


@pytest.mark.parametrize("losing", [taken_over, cancelled])
async def test_who_has_lost_a_rollout_writes_nothing_more(
    losing: Callable[[RolloutStore, RolloutStore, ManualClock], None],
    service: Service,
    journal: SqlJournal,
    clock: ManualClock,
) -> None:
    """A service that was stopped for a while and wakes up finds neither its groups nor its events stored twice."""
    one, other = service("one"), service("other")
    rollout, held = submit(one), one.holding.held("r_1")
    assert journal.commit_many([make_group("r_1/train/0")], "r_1", held=held) == [True]
    losing(one, other, clock)
    with pytest.raises(ClaimLost, match="'rollout/r_1' is not this program's"):
        journal.commit_many([make_group("r_1/train/1")], "r_1", held=held)
    rollout.state = "completed"
    assert not one.save(rollout)
    assert [group.id for group in journal.groups("r_1")] == ["r_1/train/0"]
    threads = CallThreads("database", 1)
    log = EventLog(journal, threads)
    log.add_held(held, rollout.topic, "group", id="r_1/train/0")
    log.add(rollout.topic, "paused")
    async with asyncio.timeout(30):
        await log.flush()
        assert [event.kind for event in await log.after(rollout.topic, 0)] == ["paused"]
    await log.close()
    threads.close()


def test_it_is_over_for_all(service: Service) -> None:
    one, other = service("one"), service("other")
    rollout = submit(one)
    rollout.state = "completed"
    assert one.save(rollout) and not one.save(rollout)
    assert other.free() == [] and one.renew([rollout]) == {"r_1": "completed"}


def run_store(journal: SqlJournal, name: str, clock: ManualClock) -> TrainingStore:
    return TrainingStore(journal, name, Holding("training", dataclasses.replace(ELSEWHERE, id=name), clock))


def test_a_training_run_is_carried_out_by_one_server_and_ended_at_any(journal: SqlJournal, clock: ManualClock) -> None:
    one, other = run_store(journal, "one", clock), run_store(journal, "other", clock)
    key = KeyRing(journal).create("a", ["run"])[1]
    row = dict(id="t_1", key=key.id, idempotency_key=None, step=0, request={"env": "tone-v0"}, state="queued", created_at=1.0)
    here = one.insert(row, key)[0]
    for step in range(4):
        assert other.free() == [] and not other.take(here)
        clock.advance(BEAT_SECONDS)
        here.step = step
        assert one.renew([here]) == {"t_1": "queued"}
    assert other.free() == []
    clock.advance(LAPSE_SECONDS)
    [(there, own)] = other.free()
    assert (there.step, there.server, own) == (3, "one", False)
    assert other.take(there) and there.server == "other"
    here.state = "running"
    for late in (lambda: one.note(here), lambda: journal.commit_many([make_group("g")], "r", held=one.holding.held("t_1"))):
        with pytest.raises(ClaimLost):
            late()
    assert one.renew([here]) == {} and other.renew([there]) == {"t_1": "queued"}
    there.state = "running"
    other.note(there)
    assert one.cancel("t_1").state == "cancelled" and other.renew([there]) == {}
    with pytest.raises(ClaimLost):
        other.note(there)
    again = one.get("t_1")
    assert again is not None and again.state == "cancelled" and again.ended_at and one.free() == other.free() == []
    one.reopen(again, key)
    assert one.renew([again]) == {"t_1": "queued"} and again.server == "one" and again.ended_at is None
    with pytest.raises(ApiError, match="run t_1 is under way again already"):
        other.reopen(again, key)

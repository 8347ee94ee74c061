"""What every implementation of `Bus` promises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from journal_calls import RUN, TTL, commit
from relax_server.bus.base import Bus
from relax_server.bus.local import LocalBus
from relax_server.journal import open_journal
from relax_server.journal.base import Journal
from sample_groups import ManualClock, make_group

from relax_sdk.errors import JournalError

SOON, LONG = 0.0, 60.0
OpenBus = Callable[[], Bus]


@pytest.fixture
def journal(tmp_path: Path, clock: ManualClock) -> Iterator[Journal]:
    """Where the rollout commits."""
    journal = open_journal(tmp_path / "journal.db", clock=clock)
    yield journal
    journal.close()


@pytest.fixture(params=["local", "transfer_queue"])
def open_bus(
    request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock, journal: Journal
) -> Iterator[Callable[..., Bus]]:
    """Opens a bus as the trainer's process does; once more: as the next trainer does."""
    buses: list[Bus] = []
    journals: list[Journal] = []
    queue = request.getfixturevalue("shared_queue") if request.param == "transfer_queue" else ""

    def open_(consumer: str = "trainer") -> Bus:
        journals.append(open_journal(tmp_path / "journal.db", clock=clock))
        match request.param:
            case "local":
                buses.append(LocalBus(journals[-1], RUN, consumer, ttl=TTL))
            case "transfer_queue":
                from relax_server.bus.transfer_queue import TransferQueueBus

                buses.append(TransferQueueBus(journals[-1], RUN, consumer, ttl=TTL, name=queue))
        return buses[-1]

    yield open_
    for bus in buses:
        bus.close()
    for opened in journals:
        opened.close()


@pytest.fixture
def bus(open_bus: OpenBus) -> Bus:
    return open_bus()


def take(bus: Bus, n: int = 1, version: int = 0, max_staleness: int = 0) -> list[str] | None:
    batch = bus.take(n, version, max_staleness, SOON)
    return None if batch is None else [group.id for group in batch.groups]


def test_a_batch_holds_whole_groups_oldest_first(bus: Bus, journal: Journal) -> None:
    groups = [make_group(id, versions=(2, 4, None), task_index=i) for i, id in enumerate("abc")]
    for group in groups:
        journal.commit(group, RUN)
    batch = bus.take(2, 5, 3, SOON)
    assert batch is not None
    assert batch.groups == groups[:2]
    assert (batch.version, batch.dropped, batch.ready) == (5, 0, 1)
    assert batch.staleness == [3, 1, 0, 3, 1, 0]
    assert batch.waited >= 0


def test_no_batch_before_the_time_is_up_and_nothing_is_taken(bus: Bus, journal: Journal) -> None:
    commit(journal, "a")
    assert bus.take(2, 0, 0, 0.05) is None
    assert journal.counts(RUN).ready == 1


def test_a_take_wakes_up_when_the_last_group_arrives(bus: Bus, journal: Journal) -> None:
    commit(journal, "a")
    found: list[list[str]] = []

    def work() -> None:
        batch = bus.take(2, 0, 0, LONG)
        assert batch is not None
        found.append([group.id for group in batch.groups])

    thread = threading.Thread(target=work)
    thread.start()
    commit(journal, "b")
    thread.join(LONG)
    assert found == [["a", "b"]]


def test_stale_groups_are_dropped_and_counted_once(bus: Bus, journal: Journal) -> None:
    commit(journal, "old", "older", version=1)
    commit(journal, "new", version=3)
    assert bus.take(2, 3, 1, SOON) is None, "this take drops two, and has no batch to say so"
    commit(journal, "newer", version=3)
    batch = bus.take(2, 3, 1, SOON)
    assert batch is not None
    assert ([group.id for group in batch.groups], batch.dropped, batch.staleness) == (["new", "newer"], 2, [0, 0, 0, 0])
    commit(journal, "next", version=3)
    batch = bus.take(1, 3, 1, SOON)
    assert batch is not None and batch.dropped == 0


def test_a_group_is_taken_once(bus: Bus, journal: Journal, clock: ManualClock) -> None:
    commit(journal, *"abc")
    assert take(bus, 2) == ["a", "b"]
    clock.advance(10 * TTL)
    assert take(bus, 2) is None
    assert take(bus, 1) == ["c"]
    bus.ack(["a", "b", "c"], 1)
    assert journal.counts(RUN).acked == 3
    assert take(bus, 1) is None


def test_a_batch_that_is_given_back_is_taken_again(bus: Bus, journal: Journal) -> None:
    commit(journal, "a", "b", "c")
    batch = bus.take(2, 0, 0, SOON)
    assert batch is not None
    bus.give_back(batch)
    assert (journal.counts(RUN).leased, journal.counts(RUN).ready) == (0, 3)
    assert take(bus, 2) == ["a", "b"]


def test_a_trainer_that_restarts_sees_what_its_checkpoint_does_not_hold(open_bus: OpenBus, journal: Journal) -> None:
    first = open_bus()
    commit(journal, *"abcd")
    assert take(first, 1) == ["a"]
    first.ack(["a"], 1)
    assert take(first, 1) == ["b"]
    first.ack(["b"], 2)
    assert take(first, 1) == ["c"]
    first.close()
    second = open_bus()
    assert second.restore(1) == 2
    assert take(second, 3) == ["b", "c", "d"]
    second.ack(["b", "c", "d"], 2)
    assert journal.counts(RUN).acked == 4


def test_a_trainer_that_died_between_checkpoint_and_ack_may_ack_after_it_restarts(open_bus: OpenBus, journal: Journal) -> None:
    commit(journal, "a", "b")
    assert take(open_bus(), 2) == ["a", "b"]
    second = open_bus()
    second.ack(["a"], 1)
    assert second.restore(1) == 1
    assert take(second, 1) == ["b"]


def test_renewed_leases_stay(open_bus: Callable[..., Bus], journal: Journal, clock: ManualClock) -> None:
    bus, other = open_bus("a"), open_bus("b")
    bus.renew()
    commit(journal, "a")
    assert take(bus) == ["a"]
    for _ in range(5):
        clock.advance(TTL - 1)
        bus.renew()
    assert take(other) is None
    bus.ack(["a"], 1)
    bus.renew()


def test_a_lost_lease_is_told(open_bus: Callable[..., Bus], journal: Journal, clock: ManualClock) -> None:
    bus, other = open_bus("a"), open_bus("b")
    commit(journal, "a", "b")
    assert take(bus, 2) == ["a", "b"]
    clock.advance(TTL)
    assert take(other, 1) == ["a"]
    with pytest.raises(JournalError, match="1 of 2 groups leased by 'a' were taken by another consumer"):
        bus.renew()
    with pytest.raises(JournalError, match="'b' took it"):
        bus.ack(["a", "b"], 1)
    assert bus.restore(0) == 1
    bus.renew()


def test_a_closed_bus_ends_a_take_that_waits(bus: Bus) -> None:
    errors: list[Exception] = []

    def work() -> None:
        try:
            bus.take(1, 0, 0, LONG)
        except JournalError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    bus.close()
    thread.join(LONG)
    assert [str(error) for error in errors] == ["the bus of run 'run-1' is closed"]


def test_what_is_forgotten_stays_leased_until_it_is_acked(bus: Bus, journal: Journal) -> None:
    commit(journal, "a", "b")
    assert take(bus, 2) == ["a", "b"]
    bus.forget(["a", "unknown"])
    bus.release_ahead()
    assert take(bus) is None and journal.counts(RUN).leased == 2
    bus.ack(["a", "b"], 1)
    assert journal.counts(RUN).acked == 2

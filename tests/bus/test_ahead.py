"""Leasing ahead changes nothing but the time at which groups are leased."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from journal_calls import RUN, TTL, commit
from relax_server.bus.ahead import LeasesAhead
from relax_server.bus.local import LocalBus
from relax_server.journal import open_journal
from relax_server.journal.base import Journal, JournalCounts
from sample_groups import ManualClock

from relax_sdk.errors import JournalError


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def journal(tmp_path: Path, clock: ManualClock) -> Iterator[Journal]:
    journal = open_journal(tmp_path / "journal.db", clock=clock)
    yield journal
    journal.close()


@pytest.fixture
def bus(journal: Journal) -> LeasesAhead:
    return LeasesAhead(journal, RUN, ttl=TTL, ahead=2)


def take(bus: LocalBus, n: int, version: int, max_staleness: int = 0) -> tuple[list[str], int] | None:
    batch = bus.take(n, version, max_staleness, 0.0)
    return None if batch is None else ([group.id for group in batch.groups], batch.dropped)


def ahead(bus: LeasesAhead) -> list[str]:
    """Lease all that may be."""
    return [group.id for group in iter(bus.lease_ahead, None)]


def test_nothing_is_leased_before_the_first_take_and_no_more_than_allowed(bus: LeasesAhead, journal: Journal) -> None:
    commit(journal, *"abcd")
    assert ahead(bus) == []
    assert take(bus, 1, 0) == (["a"], 0)
    assert ahead(bus) == ["b", "c"]
    assert journal.counts(RUN) == JournalCounts(ready=1, leased=3)
    assert bus.holds("a") and bus.holds("c") and not bus.holds("d")
    batch = bus.take(1, 0, 0, 0.0)
    assert batch is not None and batch.ready == 2, "what is leased ahead is ready"
    assert ahead(bus) == ["d"]
    assert take(bus, 2, 0) == (["c", "d"], 0)


def test_staleness_is_looked_at_when_the_batch_is_taken(bus: LeasesAhead, journal: Journal) -> None:
    commit(journal, "now")
    assert take(bus, 1, 0) == (["now"], 0)
    commit(journal, "old")
    commit(journal, "new", version=1)
    assert ahead(bus) == ["old", "new"], "both are fresh for version 0"
    assert take(bus, 2, 1) is None, "for version 1 one of them is not"
    assert journal.counts(RUN) == JournalCounts(leased=2, stale=1)
    commit(journal, "newer", version=1)
    assert take(bus, 2, 1) == (["new", "newer"], 1)
    bus.renew()


def test_a_trainer_that_dies_or_ends_leaves_nothing_leased(bus: LeasesAhead, journal: Journal, clock: ManualClock) -> None:
    commit(journal, *"abc")
    assert take(bus, 1, 0) == (["a"], 0)
    assert ahead(bus) == ["b", "c"]
    bus.release_ahead()
    assert ahead(bus) == []
    assert journal.counts(RUN) == JournalCounts(ready=2, leased=1)
    assert take(bus, 1, 0) == (["b"], 0)
    assert ahead(bus) == ["c"]
    after = LeasesAhead(journal, RUN, ttl=TTL, ahead=2)
    assert after.restore(0) == 3
    assert ahead(after) == []
    assert take(after, 3, 0) == (["a", "b", "c"], 0)


def test_leases_ahead_are_renewed_and_a_lost_one_is_told(bus: LeasesAhead, journal: Journal, clock: ManualClock) -> None:
    commit(journal, *"abc")
    assert take(bus, 1, 0) == (["a"], 0)
    assert ahead(bus) == ["b", "c"]
    clock.advance(TTL - 1)
    bus.renew()
    clock.advance(TTL)
    assert take(LocalBus(journal, RUN, "other", ttl=TTL), 1, 0) == (["a"], 0)
    with pytest.raises(JournalError, match="1 of 3 groups leased by 'trainer' were taken"):
        bus.renew()


events = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.integers(0, 3)),
        st.tuples(st.just("take"), st.integers(1, 3)),
        st.tuples(st.just("ahead"), st.integers(1, 3)),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(events, st.integers(0, 2))
@example([*[("commit", 0)] * 3, ("take", 1), ("commit", 0), ("commit", 1), ("ahead", 3), ("take", 1)], 0)
def test_the_same_batches_are_served_and_the_same_groups_dropped(events: list[tuple[str, int]], k: int) -> None:
    """Beside a `LocalBus` on a journal of its own; a group is at most 3 versions old when it is committed.

    A batch that was leased ahead does not ask the journal, so what is too old there is dropped with the next one that does.
    """
    with tempfile.TemporaryDirectory() as folder:
        journals = [open_journal(Path(folder) / name) for name in ("a.db", "b.db")]
        plain, early = LocalBus(journals[0], RUN), LeasesAhead(journals[1], RUN, ahead=4)
        version, committed, dropped = 0, 0, [0, 0]
        for event, value in events:
            if event == "commit":
                committed += 1
                for journal in journals:
                    commit(journal, f"g{committed}", version=max(0, version - value))
            elif event == "take":
                served = [take(bus, value, version, k) for bus in (plain, early)]
                if served[0] is None or served[1] is None:
                    assert served == [None, None]
                    continue
                assert served[0][0] == served[1][0]
                dropped = [n + batch[1] for n, batch in zip(dropped, served, strict=True) if batch is not None]
                assert dropped[0] >= dropped[1]
                version += 1
            elif event == "ahead":
                for _ in range(value):
                    early.lease_ahead()
        early.release_ahead()
        assert take(plain, 100, version, k) is take(early, 100, version, k) is None, "there are fewer"
        assert journals[0].counts(RUN) == journals[1].counts(RUN), "the same groups are dropped in the end"
        for journal in journals:
            journal.close()

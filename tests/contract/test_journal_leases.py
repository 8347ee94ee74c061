"""What every implementation of `Journal` promises of leases: whom they serve, and when they end."""

from __future__ import annotations

import threading

import pytest
from journal_calls import RUN, TTL, Open, commit, lease
from relax_server.journal.base import Journal, JournalCounts
from sample_groups import ManualClock, make_group

from relax_sdk.errors import ConfigError, JournalError


def test_oldest_means_committed_first_whatever_the_clock_says(journal: Journal, clock: ManualClock) -> None:
    for id in ("c", "a", "b"):
        commit(journal, id)
        clock.advance(-1000)
    assert lease(journal, 2) == ["c", "a"]
    assert lease(journal, 1) == ["b"]


def test_a_lease_is_all_or_nothing(journal: Journal) -> None:
    commit(journal, "g", "h")
    assert lease(journal, 3) == []
    assert journal.counts(RUN) == JournalCounts(ready=2)
    commit(journal, "i")
    found = journal.lease(3, RUN, "a", 0, 0, TTL)
    assert [found.dropped, *(x.version_min for x in found.leases)] == [0, 0, 0, 0]
    assert {x.expires_at for x in found.leases} == {1_700_000_000.0 + TTL}
    assert journal.counts(RUN) == JournalCounts(leased=3)


def test_groups_that_are_too_old_are_dropped_and_counted_even_when_nothing_is_leased(journal: Journal) -> None:
    commit(journal, "old", "older", version=1)
    commit(journal, "new", version=3)
    found = journal.lease(9, RUN, "a", 4, 2, TTL)
    assert (found.leases, found.dropped) == ([], 2)
    assert journal.counts(RUN) == JournalCounts(ready=1, stale=2)
    assert journal.lease(1, RUN, "a", 4, 2, TTL).dropped == 0
    assert lease(journal, 1, "b", version=1, k=9) == [], (
        "what was dropped is never served, also not to a consumer that is behind"
    )


def test_the_oldest_token_decides(journal: Journal) -> None:
    journal.commit(make_group("mixed", versions=(2, 5, None)), RUN)
    assert journal.lease(1, RUN, "a", 5, 2, TTL).dropped == 1
    journal.commit(make_group("at the limit", versions=(3, 5)), RUN)
    assert lease(journal, version=5, k=2) == ["at the limit"]


def test_a_group_without_tokens_is_counted_and_never_served(journal: Journal) -> None:
    journal.commit(make_group("silent", versions=(None, None), task_index=4), RUN)
    journal.commit(make_group("nobody", versions=(), task_index=5), RUN)
    assert journal.counts(RUN) == JournalCounts(empty=2)
    assert journal.counts(RUN).total == 2
    assert journal.lease(1, RUN, "a", 10, 0, TTL) == journal.lease(1, RUN, "a", 0, 0, TTL)
    assert lease(journal) == []
    assert journal.task_indices(RUN) == [4, 5]


def test_only_train_groups_of_the_run_are_leased(journal: Journal) -> None:
    journal.commit(make_group("held out"), RUN, split="eval")
    journal.commit(make_group("elsewhere"), "run-2")
    assert lease(journal) == []
    assert journal.counts(RUN).total == 0
    assert journal.task_indices(RUN) == []


@pytest.mark.parametrize("bad", [{"n": 0}, {"k": -1}, {"ttl": 0.0}, {"ttl": float("nan")}, {"ttl": float("inf")}])
def test_a_lease_that_makes_no_sense_is_refused(journal: Journal, bad: dict) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        lease(journal, **bad)


def test_threads_never_lease_the_same_group(journal: Journal) -> None:
    commit(journal, *(f"g{i}" for i in range(40)))
    got: list[str] = []

    def work(consumer: str) -> None:
        while ids := lease(journal, 2, consumer):
            got.extend(ids)

    threads = [threading.Thread(target=work, args=(f"c{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(got) == sorted(f"g{i}" for i in range(40))


def test_a_lease_that_ended_is_served_to_another_consumer(journal: Journal, clock: ManualClock) -> None:
    commit(journal, "g", "h")
    assert lease(journal, 1, "a") == ["g"]
    clock.advance(TTL - 1)
    assert lease(journal, 2, "b") == []
    clock.advance(1)
    assert journal.counts(RUN) == JournalCounts(ready=2)
    assert lease(journal, 2, "b") == ["g", "h"]
    with pytest.raises(JournalError, match="'g' for consumer 'a': its lease ended and 'b' took it"):
        journal.ack(["g"], RUN, "a", 1)
    assert journal.renew(RUN, "a", TTL) == 0


def test_an_ack_after_the_end_counts_while_nobody_took_the_group(journal: Journal, clock: ManualClock) -> None:
    commit(journal, "g")
    lease(journal)
    clock.advance(10 * TTL)
    assert journal.ack(["g"], RUN, "a", 1) == 1
    assert lease(journal, 1, "b") == []


def test_renewing_extends_also_a_lease_that_ended(journal: Journal, clock: ManualClock) -> None:
    commit(journal, "g", "h")
    lease(journal, 2)
    clock.advance(TTL + 1)
    assert journal.renew(RUN, "a", TTL) == 2
    clock.advance(TTL - 1)
    assert lease(journal, 1, "b") == []
    clock.advance(1)
    assert lease(journal, 1, "b") == ["g"]
    assert journal.renew(RUN, "a", TTL) == 1


def test_no_clock_serves_a_consumer_its_own_groups_twice(journal: Journal, clock: ManualClock) -> None:
    commit(journal, "g")
    assert lease(journal) == ["g"]
    clock.advance(1e6)
    found = journal.lease(1, RUN, "a", 99, 0, TTL)
    assert (found.leases, found.dropped) == ([], 0), "it is neither served again nor dropped under the trainer's feet"
    assert journal.ack(["g"], RUN, "a", 1) == 1


def test_a_consumer_that_died_and_came_back_gets_its_groups_when_the_leases_end(open_again: Open, clock: ManualClock) -> None:
    first = open_again()
    commit(first, "g")
    assert lease(first) == ["g"]
    second = open_again()
    assert lease(second) == []
    assert second.renew(RUN, "a", TTL) == 0
    clock.advance(TTL)
    assert lease(second) == ["g"]


def test_a_clock_set_back_does_not_make_a_lease_last(journal: Journal, clock: ManualClock) -> None:
    commit(journal, "g")
    assert lease(journal, 1, "dead") == ["g"]
    clock.advance(-1e6)
    assert lease(journal, 1, "b") == []
    clock.advance(TTL - 1)
    assert lease(journal, 1, "b") == [], "its holder still has the time it was given"
    clock.advance(1)
    assert lease(journal, 1, "b") == ["g"]

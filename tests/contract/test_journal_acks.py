"""What every implementation of `Journal` promises of groups that were trained on, dropped, given back or set aside."""

from __future__ import annotations

import pytest
from journal_calls import RUN, TTL, Open, commit, lease
from relax_server.journal.base import Journal, JournalCounts
from sample_groups import ManualClock, make_group

from relax_sdk.errors import JournalError


def test_ack_names_the_checkpoint_and_may_be_repeated(journal: Journal) -> None:
    commit(journal, "g", "h")
    lease(journal, 2)
    assert journal.ack(["g"], RUN, "a", 1) == 1
    assert journal.ack(["g", "h", "g"], RUN, "a", 2) == 2
    assert journal.ack(["g"], RUN, "a", 2) == 1
    assert journal.counts(RUN) == JournalCounts(acked=2)
    assert journal.restore(RUN, "a", 1) == 1, "g stays in checkpoint 1, where it was first"
    assert lease(journal, 1) == ["h"]


def test_ack_is_all_or_nothing(journal: Journal) -> None:
    commit(journal, "g", "h")
    lease(journal, 1)
    for bad, why in (("h", "not leased"), ("nowhere", "run 'run-1' has none of this id")):
        with pytest.raises(JournalError, match=why):
            journal.ack(["g", bad], RUN, "a", 1)
    assert journal.counts(RUN) == JournalCounts(ready=1, leased=1)
    assert journal.ack([], RUN, "a", 1) == 0


def test_ack_of_another_consumers_group_is_refused(journal: Journal) -> None:
    commit(journal, "g", "silent")
    lease(journal, 1, "a")
    with pytest.raises(JournalError, match="'a' took it"):
        journal.ack(["g"], RUN, "b", 1)
    journal.ack(["g"], RUN, "a", 3)
    with pytest.raises(JournalError, match="'a' acked it in checkpoint 3"):
        journal.ack(["g"], RUN, "b", 4)
    with pytest.raises(JournalError, match="calls restore first"):
        journal.ack(["g"], RUN, "a", 2)
    with pytest.raises(JournalError, match="none of this id"):
        journal.ack(["g"], "run-2", "a", 3)


def test_ack_of_a_group_dropped_after_its_lease_ended_is_refused(journal: Journal, clock: ManualClock) -> None:
    commit(journal, "g")
    lease(journal, 1, "a")
    clock.advance(TTL)
    assert journal.lease(1, RUN, "b", 5, 0, TTL).dropped == 1
    with pytest.raises(JournalError, match="dropped as too old"):
        journal.ack(["g"], RUN, "a", 1)


def test_a_trainer_that_restarts_gets_exactly_what_came_after_its_checkpoint(open_again: Open) -> None:
    journal = open_again()
    commit(journal, *"abcdef")
    lease(journal, 2)
    journal.ack(["a", "b"], RUN, "a", 1)
    lease(journal, 2)
    journal.ack(["c", "d"], RUN, "a", 2)
    lease(journal, 1)
    again = open_again()
    assert again.restore(RUN, "a", 1) == 3
    assert again.restore(RUN, "a", 1) == 0
    assert lease(again, 4) == ["c", "d", "e", "f"]
    assert again.counts(RUN) == JournalCounts(leased=4, acked=2)
    assert again.restore(RUN, "a", 1) == 4
    with pytest.raises(JournalError, match="not leased"):
        again.ack(["c"], RUN, "a", 2)


def test_restore_leaves_the_leases_of_others_alone(journal: Journal) -> None:
    commit(journal, "g", "h")
    lease(journal, 1, "a")
    lease(journal, 1, "b")
    assert journal.restore(RUN, "a", 0) == 1
    assert journal.ack(["h"], RUN, "b", 1) == 1


def test_leases_that_are_given_back_are_ready_at_once_and_others_stay(journal: Journal) -> None:
    commit(journal, *"ghi")
    assert lease(journal, 2, "a") == ["g", "h"]
    assert lease(journal, 1, "b") == ["i"]
    assert journal.release(["g", "i", "unknown"], RUN, "a") == 1
    assert journal.counts(RUN) == JournalCounts(ready=1, leased=2)
    assert lease(journal, 1, "a") == ["g"]
    assert journal.ack(["g", "h"], RUN, "a", 1) == 2
    assert journal.release(["g"], RUN, "a") == 0, "an acked group stays acked"


def test_leased_groups_that_became_too_old_are_dropped_for_good(open_again: Open, clock: ManualClock) -> None:
    journal = open_again()
    commit(journal, *"abcd")
    assert lease(journal, 3) == ["a", "b", "c"]
    assert journal.drop(["a", "d", "unknown"], RUN, "a") == 1, "one is not leased, one is not there"
    assert journal.drop(["b"], RUN, "other") == 0, "it is somebody else's"
    assert journal.drop(["a"], RUN, "a") == 0
    journal.ack(["b"], RUN, "a", 1)
    assert journal.drop(["b"], RUN, "a") == 0, "an acked group stays acked"
    assert journal.counts(RUN) == JournalCounts(ready=1, leased=1, acked=1, stale=1)
    with pytest.raises(JournalError, match=r"cannot ack group 'a'.*dropped as too old"):
        journal.ack(["a"], RUN, "a", 1)
    clock.advance(2 * TTL)
    assert journal.restore(RUN, "a", 0) == 2
    assert lease(open_again(), 3) == ["b", "c", "d"], "what was dropped does not come back"


def test_many_groups_are_acked_at_once(journal: Journal) -> None:
    ids = [f"g{i}" for i in range(1100)]
    for id in ids:
        journal.commit(make_group(id, versions=(0,)), RUN)
    assert lease(journal, 1100) == ids
    assert journal.ack(ids, RUN, "a", 1) == 1100
    assert journal.counts(RUN) == JournalCounts(acked=1100)


def test_a_group_set_aside_is_counted_with_its_reason_and_never_served_again(open_again: Open) -> None:
    journal = open_again()
    commit(journal, "g", "h")
    assert lease(journal, 2) == ["g", "h"]
    assert journal.set_aside("g", RUN, "a", "MediaError: cut file")
    assert not journal.set_aside("g", RUN, "a", "again"), "it is not held any more"
    assert not journal.set_aside("h", RUN, "b", "held by another consumer")
    journal.release(["g", "h"], RUN, "a")
    journal.restore(RUN, "a", 0)
    other = open_again()
    assert other.counts(RUN) == JournalCounts(ready=1, failed=1)
    assert other.counts(RUN).given_up == 1
    assert other.failures(RUN) == {"g": "MediaError: cut file"}
    assert lease(other, 2) == [] and lease(other) == ["h"]
    with pytest.raises(JournalError, match="set aside"):
        other.ack(["g"], RUN, "a", 1)

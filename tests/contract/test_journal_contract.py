"""What every implementation of `Journal` promises."""

from __future__ import annotations

import dataclasses
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from relax_server.journal import open_journal
from relax_server.journal.base import Journal, JournalCounts
from relax_server.journal.sql import SqlJournal
from sample_groups import ManualClock, make_group

from relax_sdk.errors import ConfigError, JournalError
from relax_sdk.run_lock import Holder, born

Open = Callable[..., Journal]
RUN, TTL = "run-1", 60.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["sqlite", "postgres"])
def open_again(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Open]:
    """Opens the same journal, as often as it is called: each time like another process."""
    opened: list[Journal] = []
    where = tmp_path / "journal.db" if request.param == "sqlite" else request.getfixturevalue("postgres").make()

    def open_(claim: str | None = None) -> Journal:
        opened.append(open_journal(where, claim=claim, clock=clock))
        return opened[-1]

    yield open_
    for journal in opened:
        journal.close()


@pytest.fixture
def journal(open_again: Open) -> Journal:
    return open_again()


def lease(journal: Journal, n: int = 1, consumer: str = "a", version: int = 0, k: int = 0, ttl: float = TTL) -> list[str]:
    return [lease.group.id for lease in journal.lease(n, RUN, consumer, version, k, ttl).leases]


def commit(journal: Journal, *ids: str, version: int = 0) -> None:
    for id in ids:
        assert journal.commit(make_group(id, versions=(version, version)), RUN)


# ---------------------------------------------------------------------------------------------------------------- commit


def test_a_committed_group_is_read_back_whole_by_another_process(open_again: Open) -> None:
    group = make_group("g", versions=(3, None, 5), task_index=7)
    assert open_again().commit(group, RUN)
    other = open_again()
    assert other.groups(RUN) == [group]
    assert other.trajectory("g-1") == group.trajectories[1]
    assert other.task_indices(RUN) == [7]
    assert other.counts(RUN) == JournalCounts(ready=1)


def test_committing_a_group_again_changes_nothing(journal: Journal) -> None:
    assert journal.commit(make_group("g", versions=(1, 1)), RUN)
    assert not journal.commit(make_group("g", versions=(2, 2)), RUN)
    assert [g.version_min for g in journal.groups(RUN)] == [1]
    assert lease(journal, version=1) == ["g"]
    assert not journal.commit(make_group("g", versions=(1, 1)), RUN)
    assert journal.counts(RUN) == JournalCounts(leased=1)


def test_a_trajectory_knows_the_key_that_it_was_made_for(open_again: Open) -> None:
    one, other = open_again(), open_again()
    one.commit(make_group("mine"), RUN, owner="key_a")
    one.commit_many([make_group("a"), make_group("b")], RUN, "eval", owner="key_b")
    one.commit(make_group("of a run"), RUN)
    assert isinstance(other, SqlJournal)
    for id, owner in (("mine-0", "key_a"), ("mine-1", "key_a"), ("a-0", "key_b"), ("b-1", "key_b"), ("of a run-0", None)):
        found = other.owned_trajectory(id)
        assert found is not None and (found[0].id, found[1]) == (id, owner)
    assert other.owned_trajectory("nothing") is None


def test_a_trajectory_id_belongs_to_one_group(journal: Journal) -> None:
    commit(journal, "g")
    thief = make_group("h")
    thief.trajectories[1].id = "g-0"
    with pytest.raises(JournalError, match=r"'g-0' of group 'h' is taken: group 'g'"):
        journal.commit(thief, RUN)
    twin = make_group("h")
    twin.trajectories[1].id = "h-0"
    with pytest.raises(JournalError, match=r"'h-0' occurs 2 times in group 'h'"):
        journal.commit(twin, RUN)
    assert [g.id for g in journal.groups(RUN)] == ["g"]
    assert [t.id for t in journal.trajectories(RUN)] == ["g-1", "g-0"]


def test_a_group_id_of_another_run_is_not_mistaken_for_a_repetition(journal: Journal) -> None:
    commit(journal, "g")
    with pytest.raises(JournalError, match="taken: run 'run-1', split 'train'"):
        journal.commit(make_group("g"), "run-2")
    with pytest.raises(JournalError, match="taken"):
        journal.commit(make_group("g"), RUN, split="eval")


def test_what_could_not_be_trained_on_is_refused(journal: Journal) -> None:
    uncovered = make_group("g")
    uncovered.trajectories[0].turns[0].weight_versions[0].end = 3
    with pytest.raises(JournalError, match=r"trajectory 'g-0' of group 'g', turn 0: .*do not cover 4 response tokens"):
        journal.commit(uncovered, RUN)
    silent = make_group("g")
    silent.trajectories[1].turns[0].response_logprobs.pop()
    with pytest.raises(JournalError, match="'g-1' of group 'g', turn 0: 3 logprobs for 4 response tokens"):
        journal.commit(silent, RUN)
    infinite = make_group("g")
    infinite.trajectories[0].rewards["style"] = float("nan")
    with pytest.raises(JournalError, match="style must be finite"):
        journal.commit(infinite, RUN)
    stranger = make_group("g")
    stranger.trajectories[0].group_id = "h"
    with pytest.raises(JournalError, match="belongs to group 'h'"):
        journal.commit(stranger, RUN)
    assert journal.counts(RUN).total == 0
    assert journal.commit(uncovered, RUN, split="eval"), "an evaluated group needs no versions"


def test_several_groups_are_committed_together_or_not_at_all(journal: Journal) -> None:
    commit(journal, "b")
    assert journal.commit_many([make_group(id) for id in "abca"], RUN) == [True, False, True, False]
    assert [g.id for g in journal.groups(RUN, newest_first=False)] == ["b", "a", "c"]
    thief = make_group("e")
    thief.trajectories[0].id = "a-0"
    with pytest.raises(JournalError, match="'a-0' of group 'e' is taken"):
        journal.commit_many([make_group("d"), thief], RUN)
    assert journal.counts(RUN).total == 3
    assert journal.commit_many([], RUN) == []


# ----------------------------------------------------------------------------------------------------------------- lease


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


# --------------------------------------------------------------------------------------------------- expiry and the clock


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


# ------------------------------------------------------------------------------------------------------- ack and restore


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


# ------------------------------------------------------------------------------------------------------- lists and state


def test_groups_are_listed_in_order_of_commit(journal: Journal) -> None:
    commit(journal, *"abc")
    assert [g.id for g in journal.groups(RUN)] == ["c", "b", "a"]
    assert [g.id for g in journal.groups(RUN, newest_first=False, limit=2)] == ["a", "b"]
    assert journal.groups(RUN, split="eval") == journal.groups("nobody") == []


def test_groups_are_fetched_by_id_whatever_their_state(journal: Journal) -> None:
    commit(journal, *"abc")
    lease(journal, 1)
    assert journal.fetch(["c", "a"]) == [make_group("c"), make_group("a")]
    assert journal.fetch([]) == []
    with pytest.raises(JournalError, match="no group 'x'"):
        journal.fetch(["a", "x"])


def test_task_indices_are_those_of_every_committed_train_group(journal: Journal) -> None:
    for id, index in (("a", 9), ("b", 2), ("c", 9)):
        journal.commit(make_group(id, task_index=index), RUN)
    lease(journal, 1)
    journal.ack(["a"], RUN, "a", 1)
    journal.lease(2, RUN, "a", 50, 0, TTL)
    assert journal.task_indices(RUN) == [2, 9]


def test_trajectories_are_listed_newest_first(journal: Journal, clock: ManualClock) -> None:
    journal.commit(make_group("g", versions=(3, None), task_index=5), RUN)
    clock.advance(1)
    journal.commit(make_group("e"), RUN, split="eval")
    rows = journal.trajectories(RUN)
    assert [row.id for row in rows] == ["e-1", "e-0", "g-1", "g-0"]
    assert [row.id for row in journal.trajectories(RUN, limit=2, offset=1)] == ["e-0", "g-1"]
    assert [row.id for row in journal.trajectories(RUN, split="train")] == ["g-1", "g-0"]
    silent, spoken = rows[2:]
    assert (spoken.group_id, spoken.env, spoken.split, spoken.task_index, spoken.status) == (
        "g",
        "tone-v0",
        "train",
        5,
        "completed",
    )
    assert (spoken.version_min, spoken.version_max, spoken.n_tokens, spoken.reward) == (3, 3, 4, 0.0)
    assert (silent.version_min, silent.n_tokens, silent.status, silent.rewards) == (None, 0, "failed", {"env": 1.0})
    assert spoken.created_at == clock.now - 1


def test_an_unknown_trajectory_is_an_error(journal: Journal) -> None:
    with pytest.raises(JournalError, match="no trajectory 'x'"):
        journal.trajectory("x")


def test_state_outlives_the_process(open_again: Open) -> None:
    journal = open_again()
    assert journal.get_state(RUN, "controller") is None
    journal.put_state(RUN, "controller", {"version": 1, "engines": ["a"]})
    journal.put_state(RUN, "controller", {"version": 2, "engines": []})
    journal.put_state("run-2", "controller", [1, None, "x"])
    other = open_again()
    assert other.get_state(RUN, "controller") == {"version": 2, "engines": []}
    assert other.get_state("run-2", "controller") == [1, None, "x"]
    for value in (object(), float("nan")):
        with pytest.raises(JournalError, match="state 'bad' of run 'run-1' must be JSON"):
            other.put_state(RUN, "bad", value)


def test_a_closed_journal_says_so(journal: Journal) -> None:
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="is closed"):
        journal.counts(RUN)


# ----------------------------------------------------------------------------------------------------------------- claim


def holder(machine: str = "elsewhere", pid: int = 4711) -> Holder:
    """A program of another machine, of which nothing is known but what the journal says."""
    return Holder(pid, "vm7", machine, born=1, since=1000.0)


def test_a_claimed_run_is_refused_to_others_and_free_when_it_is_given_back(open_again: Open) -> None:
    one, other, first, second = open_again(), open_again(), holder(), holder(pid=99)
    assert one.claim(RUN, first) is None and other.claim("run-2", second) is None
    refused = other.claim(RUN, second)
    assert refused is not None and refused.holder == first
    assert one.claim(RUN, first) is None  # the same program again
    other.end_claim(RUN, second)  # another's claim stays
    assert other.claim(RUN, second) is not None
    one.end_claim(RUN, first)
    assert other.claim(RUN, second) is None and not one.beat(RUN, first)


def test_a_claim_is_taken_only_from_a_program_that_gave_no_sign_of_life(open_again: Open) -> None:
    one, other, first, second = open_again(), open_again(), holder(), holder(pid=99)
    one.claim(RUN, first)
    seen = other.claim(RUN, second)
    assert one.beat(RUN, first)
    assert other.claim(RUN, second, instead_of=seen) is not None
    seen = other.claim(RUN, second)
    assert other.claim(RUN, second, instead_of=seen) is None
    assert not one.beat(RUN, first)


def test_a_claim_of_a_process_that_has_ended_is_free_at_once(journal: Journal) -> None:
    here = Holder.here()
    process = subprocess.Popen(["sleep", "60"])
    dead = dataclasses.replace(here, pid=process.pid, born=born(process.pid), id="dead")
    assert journal.claim(RUN, dead) is None and journal.claim(RUN, here) is not None
    process.kill()
    process.wait()
    assert journal.claim(RUN, here) is None


def test_who_works_for_a_program_that_lost_the_run_leases_and_acks_no_more(open_again: Open) -> None:
    first, second = holder(), holder(pid=99)
    old, new, nobodys = open_again(first.id), open_again(second.id), open_again(None)
    old.claim(RUN, first)
    commit(old, "a", "b", "c")
    assert lease(old) == ["a"]
    assert new.claim(RUN, second, instead_of=new.claim(RUN, second)) is None
    refused = "not this program's: it is carried out by process 99 on vm7, since "
    for attempt in (
        lambda journal: lease(journal),
        lambda journal: journal.renew(RUN, "a", TTL),
        lambda journal: journal.ack(["a"], RUN, "a", 1),
        lambda journal: journal.release(["a"], RUN, "a"),
        lambda journal: journal.drop(["a"], RUN, "a"),
        lambda journal: journal.set_aside("a", RUN, "a", "a reason"),
        lambda journal: journal.restore(RUN, "a", 0),
    ):
        for journal in (old, nobodys):
            with pytest.raises(JournalError, match=refused):
                attempt(journal)
    with pytest.raises(JournalError, match=refused):
        old.commit(make_group("d"), RUN)
    assert nobodys.counts(RUN) == JournalCounts(ready=2, leased=1) and len(nobodys.groups(RUN)) == 3  # reading is for all
    assert new.restore(RUN, "a", 0) == 1 and lease(new) == ["a"]
    new.ack(["a"], RUN, "a", 1)
    new.end_claim(RUN, second)
    with pytest.raises(JournalError, match="it was given back"):
        new.renew(RUN, "a", TTL)
    assert lease(nobodys) == ["b"]


# ------------------------------------------------------------------------------------------------------------- set aside


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

"""What every implementation of `Journal` promises of runs that are claimed."""

from __future__ import annotations

import dataclasses
import subprocess

import pytest
from journal_calls import RUN, TTL, Open, commit, lease
from relax_server.journal.base import Journal, JournalCounts
from sample_groups import make_group

from relax_sdk.errors import JournalError
from relax_sdk.run_lock import Holder, born


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

"""What every implementation of `Journal` promises of what is read from it."""

from __future__ import annotations

import pytest
from journal_calls import RUN, TTL, Open, commit, lease
from relax_server.journal.base import Journal
from sample_groups import ManualClock, make_group

from relax_sdk.errors import JournalError


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

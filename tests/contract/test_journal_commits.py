"""What every implementation of `Journal` promises of groups that are committed."""

from __future__ import annotations

import pytest
from journal_calls import RUN, Open, commit, lease
from relax_server.journal.base import Journal, JournalCounts
from relax_server.journal.sql import SqlJournal
from sample_groups import make_group

from relax_sdk.errors import JournalError


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
    one.commit(make_group("mine"), "hers", owner="key_a")
    one.commit_many([make_group("a"), make_group("b")], "his", "eval", owner="key_b")
    one.commit(make_group("of a run"), RUN)
    assert isinstance(other, SqlJournal)
    for id, owner in (("mine-0", "key_a"), ("mine-1", "key_a"), ("a-0", "key_b"), ("b-1", "key_b"), ("of a run-0", None)):
        found = other.owned_trajectory(id)
        assert found is not None and (found[0].id, found[1]) == (id, owner)
    assert other.owned_trajectory("nothing") is None


@pytest.mark.parametrize(("first", "others"), [("key_a", ("key_b", None)), (None, ("key_a",))])
def test_a_run_belongs_to_who_used_its_name_first(open_again: Open, first: str | None, others: tuple[str | None, ...]) -> None:
    one, other = open_again(), open_again()
    one.commit(make_group("g"), RUN, owner=first)
    for journal in (one, other):
        for owner in others:
            with pytest.raises(JournalError, match=r"run 'run-1' belongs to another key or training run; choose another name"):
                journal.commit(make_group("h"), RUN, owner=owner)
    assert other.commit(make_group("i"), RUN, owner=first)
    assert lease(other, 2) == ["g", "i"], "a lease returns what is its owner's, and nothing else"


def test_a_name_is_a_key_s_from_its_first_use_on(open_again: Open) -> None:
    one, other = open_again(), open_again()
    assert isinstance(one, SqlJournal) and isinstance(other, SqlJournal)
    assert one.own(RUN, "key_a") and one.own(RUN, "key_a") and other.own(RUN, "key_a")
    assert not one.own(RUN, "key_b") and not other.own(RUN, "key_b")
    with pytest.raises(JournalError, match="belongs to another"):
        other.commit(make_group("g"), RUN)
    other.put_state("of-a-program", "step", 1)
    assert not one.own("of-a-program", "key_a"), "nor may a key use the run of a program"
    assert other.commit(make_group("g"), "of-a-program")


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

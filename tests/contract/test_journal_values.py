"""Values at the edge of what can be stored: every journal refuses, mends and tells the same ones."""

from __future__ import annotations

import math

import pytest
from journal_calls import RUN, Open, commit, lease
from relax_server.journal.base import Journal
from relax_server.journal.schema import events
from relax_server.journal.sql import SqlJournal
from sample_groups import make_group
from sqlalchemy import insert, select

from relax_sdk.errors import UnstorableError


@pytest.mark.parametrize("id", ["a\0b", "\ud800"])
def test_a_name_that_cannot_be_stored_is_refused_in_questions_and_rows(journal: Journal, id: str) -> None:
    assert isinstance(journal, SqlJournal)
    for ask in (
        lambda: journal.trajectory(id),
        lambda: journal.fetch([id]),
        lambda: journal.groups(id),
        lambda: journal.put_state(RUN, id, 1),
        lambda: journal.get_state(RUN, id),
        lambda: journal.commit(make_group(id), RUN),
        lambda: journal.commit(make_group("g"), id),
    ):
        with pytest.raises(UnstorableError, match=r"NUL|surrogate"):
            ask()
    assert journal.commit(make_group("g"), RUN), "and the journal goes on"


def test_a_reason_that_cannot_be_stored_is_mended(journal: Journal) -> None:
    commit(journal, "g")
    lease(journal)
    assert journal.set_aside("g", RUN, "a", "broken at \0 and \ud800")
    assert journal.failures(RUN) == {"g": "broken at \ufffd and \ufffd"}


def test_json_is_written_so_that_it_can_be_read_and_told(open_again: Open) -> None:
    journal = open_again()
    assert isinstance(journal, SqlJournal)
    data = {"loss": math.nan, "text": "\ud800 and \0", "n": 2**64, 3: [math.inf, 2**53 + 1]}
    with journal.writing("add an event") as connection:
        connection.execute(insert(events), [{"topic": "t", "kind": "k", "data": data, "created_at": 0.0}])
    with journal.reading("read it") as connection:
        told = connection.scalars(select(events.c.data)).one()
    assert told == {"loss": None, "text": "\ufffd and \0", "n": str(2**64), "3": [None, 2**53 + 1]}


def test_text_and_numbers_that_can_be_stored_come_back_as_they_were(open_again: Open) -> None:
    group = make_group("g")
    group.trajectories[0].info = {"nul": "\0", "least": -(2**63), "most": 2**63 - 1, "far": "\U0010ffff"}
    assert open_again().commit(group, RUN)
    assert open_again().groups(RUN) == [group]

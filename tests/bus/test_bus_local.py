"""The local bus where it differs from others: it shares a journal, and renews while it waits."""

from __future__ import annotations

import threading
from pathlib import Path

from relax_server.bus.local import LocalBus, staleness
from relax_server.journal import open_journal
from relax_server.journal.sql import SqlJournal
from sample_groups import ManualClock, make_group
from sqlalchemy import event

RUN = "run-1"


def test_closing_the_bus_leaves_the_journal_to_whoever_opened_it(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "journal.db")
    journal.commit(make_group("a"), RUN)
    LocalBus(journal, RUN).close()
    assert journal.counts(RUN).ready == 1
    journal.close()


def test_a_take_that_waits_keeps_the_leases_it_has(tmp_path: Path) -> None:
    clock, ttl = ManualClock(), 0.15
    journal, elsewhere = (open_journal(tmp_path / "journal.db", clock=clock) for _ in range(2))
    assert isinstance(journal, SqlJournal)
    journal.commit(make_group("a"), RUN)
    bus, thief = LocalBus(journal, RUN, "a", ttl=ttl), LocalBus(elsewhere, RUN, "b", ttl=ttl)
    assert bus.take(1, 0, 0, 0.0) is not None
    clock.advance(0.9 * ttl)
    renewed = threading.Event()

    def watch(_c: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("UPDATE groups"):
            renewed.set()

    event.listen(journal.engine, "after_cursor_execute", watch)
    got: list[list[str]] = []

    def work() -> None:
        batch = bus.take(1, 0, 0, 60.0)
        assert batch is not None
        got.append([group.id for group in batch.groups])

    thread = threading.Thread(target=work)
    thread.start()
    assert renewed.wait(60)
    clock.advance(0.9 * ttl)
    assert thief.take(1, 0, 0, 0.0) is None
    elsewhere.commit(make_group("b"), RUN)
    thread.join(60)
    assert got == [["b"]]
    bus.ack(["a", "b"], 1)
    journal.close()
    elsewhere.close()


def test_staleness_is_that_of_the_oldest_token_and_negative_for_what_is_ahead() -> None:
    group = make_group("g", versions=(3, 7, None))
    group.trajectories[0].turns += make_group("h", versions=(1,)).trajectories[0].turns
    assert staleness([group], 5) == [4, -2, 0]
    assert staleness([], 5) == []

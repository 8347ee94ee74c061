"""Events while the journal is late, or cannot be written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from relax_server.api import events
from relax_server.api.events import EventLog
from relax_server.journal.sql import SqlJournal
from relax_server.rollout.threads import CallThreads

from relax_sdk.errors import JournalError


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[EventLog]:
    journal, threads = SqlJournal(tmp_path / "journal.db"), CallThreads("database", 2)
    it = EventLog(journal, threads)
    yield it
    await it.close()
    threads.close()
    journal.close()


async def test_events_that_were_written_late_are_told_once(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LIMIT", 0.05)
    free, insert = threading.Event(), log._insert

    def late(rows: Any) -> Any:
        free.wait(30)
        return insert(rows)

    monkeypatch.setattr(log, "_insert", late)
    log.add("session/a", "turn", number=1)
    with pytest.raises(JournalError, match="events"):
        await log.flush()
    log.add("session/a", "turn", number=2)
    await asyncio.sleep(0.2)
    monkeypatch.setattr(events, "LIMIT", 30.0)
    free.set()
    await log.flush()
    assert [event.data for event in await log.after("session/a", 0)] == [{"number": 1}, {"number": 2}] and log.error is None


async def test_events_that_wait_are_bounded_and_the_oldest_are_let_go(
    log: EventLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events, "MOST_WAITING", 10)
    monkeypatch.setattr(events, "LET_GO", 4)
    monkeypatch.setattr(events, "AGAIN", 0.01)
    insert, broken = log._insert, [True]

    def write(rows: Any) -> Any:
        return [JournalError("the disk is full")] * len(rows) if broken else insert(rows)

    monkeypatch.setattr(log, "_insert", write)
    for number in range(25):
        log.add("session/a", "turn", number=number)
        if number == 5:
            with pytest.raises(JournalError, match="disk is full"):
                await log.flush()
    assert log.dropped == 16 and "the oldest 4 events that waited are let go, 16 in all" in caplog.text
    broken.clear()
    log.add("session/a", "turn", number=25)
    await log.flush()
    assert [event.data["number"] for event in await log.after("session/a", 0)] == list(range(16, 26))

"""Groups on their way into the journal: one that cannot be stored fails alone, and the database fails nobody for good."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from relax_server.journal.sql import SqlJournal
from relax_server.rollout import commits
from relax_server.rollout.commits import Committer
from sample_groups import make_group

from relax_sdk.errors import JournalError, UnstorableError
from relax_sdk.trajectory import Group

RUN = "run"


class Watched(SqlJournal):
    """Counts transactions, and can be held up."""

    tries = 0
    held: threading.Event | None = None
    broken = False

    def commit_many(self, groups: Sequence[Group], *place: Any, **more: Any) -> list[bool]:
        self.tries += 1
        if self.held is not None:
            self.held.wait(30)
        if self.broken:
            raise JournalError("the disk is full")
        return super().commit_many(groups, *place, **more)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Watched]:
    it = Watched(tmp_path / "journal.db")
    yield it
    it.close()


def bad(group_id: str, fields: dict[str, Any]) -> Group:
    group = make_group(group_id)
    for name, value in fields.items():
        setattr(group.trajectories[0], name, value)
    return group


BAD = [
    {"info": {"metadata": {"note": "\ud800"}}},
    {"info": {"n": 2**64}},
    {"info": {"object": object()}},
    {"error": "\udfff"},
    {"reward": float("inf")},
    {"group_id": "another"},
    {"id": "good-0-0"},
    {"id": "\0"},
    {"task_index": 2**63},
]


@pytest.mark.parametrize("fields", BAD, ids=lambda fields: next(iter(fields)))
async def test_one_that_cannot_be_stored_fails_alone(journal: Watched, fields: dict[str, Any]) -> None:
    committer = Committer(journal, RUN)
    groups = [make_group(f"good-{i}") for i in range(20)]
    groups.insert(13, bad("bad", fields))
    results = await asyncio.gather(*(committer.commit(group, "train") for group in groups), return_exceptions=True)
    await committer.close()
    refused = results.pop(13)
    assert isinstance(refused, UnstorableError) and str(refused).isprintable()
    assert results == [True] * 20
    assert [g.id for g in journal.groups(RUN, newest_first=False)] == [f"good-{i}" for i in range(20)]
    assert journal.tries <= 2 * 6, "they are halved, not written one by one"


async def test_the_field_that_cannot_be_stored_is_named(journal: Watched) -> None:
    committer = Committer(journal, RUN)
    with pytest.raises(UnstorableError, match=r"trajectory 'g-0' cannot be stored: info\.metadata\.note holds half") as caught:
        await committer.commit(bad("g", {"info": {"metadata": {"note": "\ud800"}}}), "train")
    assert caught.value.field == "info.metadata.note"
    await committer.close()


async def test_what_the_database_cannot_do_is_tried_once_and_can_be_repeated(journal: Watched) -> None:
    committer, groups = Committer(journal, RUN), [make_group(f"g{i}") for i in range(8)]
    journal.broken = True
    results = await asyncio.gather(*(committer.commit(group, "train") for group in groups), return_exceptions=True)
    assert all(isinstance(error, JournalError) and not isinstance(error, UnstorableError) for error in results)
    assert journal.tries == 1
    journal.broken = False
    assert await asyncio.gather(*(committer.commit(group, "train") for group in groups)) == [True] * 8
    await committer.close()


async def test_a_journal_that_hangs_is_told_to_all_that_wait_and_what_went_through_is_found(
    journal: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group that was being written is durable later on; committing it again says so, and writes nothing twice."""
    monkeypatch.setattr(commits, "COMMIT_TIMEOUT", 0.3)
    committer, journal.held = Committer(journal, RUN), threading.Event()
    waiting = [committer.commit(make_group("g"), "train"), committer.commit(make_group("h"), "train", run="another")]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in results] == [JournalError, JournalError], "nobody waits for a turn that never comes"
    journal.held.set()
    monkeypatch.setattr(commits, "COMMIT_TIMEOUT", 30.0)
    while not journal.groups(RUN):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    journal.held = None
    assert await committer.commit(make_group("g"), "train") is False
    assert await committer.commit(make_group("h"), "train", run="another") is True
    await committer.close()

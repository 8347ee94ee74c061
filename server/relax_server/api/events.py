"""Events that clients follow: durable before they are told, numbered, and read again from any number on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert, select

from relax_sdk.errors import ClaimLost, JournalError, UnstorableError
from relax_server.api.logs import FIELDS
from relax_server.journal import claims
from relax_server.journal.apart import write_apart
from relax_server.journal.claims import Held
from relax_server.journal.schema import events
from relax_server.journal.sql import SqlJournal
from relax_server.rollout.threads import CallThreads

logger = logging.getLogger(__name__)

OFTEN = frozenset({"turn", "step", "reward"})
"""Kinds of which an episode has many."""
BATCH = 512
"""Events read in one go."""
OTHERS = 1.0
"""Seconds after which a follower looks for events that another server wrote."""
LIMIT = 60.0
"""Seconds that a read may take, and a write until those who wait for it are told that it is late."""
EVER = 10 * 365 * 86_400.0
MOST_WAITING, LET_GO = 50_000, 5_000
"""Events that are kept while they cannot be written, and how many of the oldest are let go together when there are more."""
AGAIN = 1.0
"""Seconds after a write that failed until the next one."""
PAUSE = 0.02
"""Seconds in which events gather before they are written: a transaction costs about as much as fifty of them."""


_Waiting = tuple[Held | None, dict[str, Any]]
"""The claim that an event is told under, and its row."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a rollout or a session."""

    seq: int
    """Rises over all topics."""
    topic: str
    """`rollout/<id>` or `session/<id>`."""
    kind: str
    data: dict[str, Any]


class EventLog:
    """Events in the journal's database. Belongs to one event loop.

    Events are gathered for a moment and written together, so their number costs little.

    Args:
        journal: whose database it is.
        threads: where it waits for the database.
        clock: Unix seconds.
    """

    def __init__(self, journal: SqlJournal, threads: CallThreads, clock: Callable[[], float] = time.time) -> None:
        self._journal, self._threads, self._clock = journal, threads, clock
        self._waiting: list[_Waiting] = []
        self._writer: asyncio.Task[None] | None = None
        self._told: dict[str, asyncio.Event] = {}
        self._followers: dict[str, int] = {}
        self._look_again = OTHERS if journal.shared else None
        self.error: JournalError | None = None
        """Error of the last write; what it held is tried again soon."""
        self.dropped = 0
        """Events that were let go because too many waited for a journal that could not be written."""

    def add(self, topic: str, kind: str, **data: Any) -> None:
        """Note an event; it is written soon, and logged at once: model calls and steps at level debug, the others at info."""
        self.add_held(None, topic, kind, **data)

    def add_held(self, held: Held | None, topic: str, kind: str, **data: Any) -> None:
        """As `add`, for an event that is told under a claim; it is left out when that is lost before the event is written."""
        level = logging.DEBUG if kind in OFTEN else logging.INFO
        if logger.isEnabledFor(level):
            what, _, id = topic.partition("/")
            plain = {name: value for name, value in data.items() if isinstance(value, (str, int, float)) or value is None}
            logger.log(level, "%s %s", what, kind, extra={FIELDS: {what: id} | plain})
        row = {"topic": topic, "kind": kind, "data": data, "created_at": self._clock()}
        self._waiting.append((held, row))
        if len(self._waiting) > MOST_WAITING:
            self._let_go()
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())

    async def flush(self) -> None:
        """Wait until what was added is durable.

        Raises:
            JournalError: it could not be written.
        """
        while self._writer is not None:
            if not (await asyncio.wait({self._writer}, timeout=LIMIT))[0]:
                raise self.error or JournalError(f"events were not written within {LIMIT:g} s")
        if self.error is not None and self._waiting:
            raise self.error

    async def after(self, topic: str, seq: int, limit: int = BATCH) -> list[Event]:
        """The events of a topic behind a number, oldest first."""

        def read() -> list[Event]:
            query = select(events).where(events.c.topic == topic, events.c.seq > seq).order_by(events.c.seq).limit(limit)
            with self._journal.reading(f"read the events of {topic}") as connection:
                return [Event(row.seq, row.topic, row.kind, row.data) for row in connection.execute(query)]

        return await self._threads.call(read, limit=LIMIT)

    async def rest(self, topic: str, seq: int) -> AsyncIterator[Event]:
        """The events of a topic behind a number, as far as there are any."""
        await self.flush()
        while found := await self.after(topic, seq):
            for event in found:
                yield event
            seq = found[-1].seq

    async def follow(self, topic: str, seq: int = 0, until: Callable[[], bool] = lambda: False) -> AsyncIterator[Event]:
        """The events of a topic behind a number, and those that come.

        Args:
            topic: whose.
            seq: the last one known; 0: from the beginning.
            until: says when to end; asked when there are no more events, and after `wake`.
        """
        self._followers[topic] = self._followers.get(topic, 0) + 1
        try:
            while not until():
                told = self._told.setdefault(topic, asyncio.Event())
                found = await self.after(topic, seq)
                for event in found:
                    yield event
                    seq = event.seq
                if not found:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._look_again):
                            await told.wait()
        finally:
            self._followers[topic] -= 1
            if not self._followers[topic]:
                del self._followers[topic]
                self._told.pop(topic, None)

    def wake(self, topic: str) -> None:
        """Have all who follow a topic look again."""
        told = self._told.pop(topic, None)
        if told is not None:
            told.set()

    def followed(self, topic: str) -> bool:
        """Whether anybody follows a topic."""
        return topic in self._followers

    async def close(self) -> None:
        """Write what is left, as far as the journal takes it in time."""
        if self._writer is not None and not (await asyncio.wait({self._writer}, timeout=LIMIT))[0]:
            logger.error("whether the last events were written is not known: the journal does not answer")
            self._writer.cancel()

    async def _write(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(PAUSE)
                batch, self._waiting = self._waiting, []
                results = await self._written(batch)
                late = self._sort_out(batch, results)
                for topic in {row["topic"] for _, row in batch}:
                    self.wake(topic)
                self.error = late
                if late is not None:
                    asyncio.get_running_loop().call_later(AGAIN, self._again)
                    return
        finally:
            self._writer = None

    async def _written(self, batch: list[_Waiting]) -> Sequence[Exception | None]:
        """Write rows, however long that takes: what was begun may become durable late, and another would tell it twice."""
        writing = self._threads.submit(self._insert, batch, limit=EVER).future
        while not (await asyncio.wait({writing}, timeout=LIMIT))[0]:
            self.error = JournalError(f"the journal has not taken events for {LIMIT:g} s or more")
            logger.warning("%s; %d more wait", self.error, len(self._waiting))
        try:
            return writing.result()
        except Exception as error:
            return [error] * len(batch)

    def _let_go(self) -> None:
        """Forget the oldest events that wait; who follows them finds what became of sessions and rollouts in the journal."""
        del self._waiting[:LET_GO]
        self.dropped += LET_GO
        why = "the journal takes them too slowly, or not at all"
        logger.error("the oldest %d events that waited are let go, %d in all: %s", LET_GO, self.dropped, why)

    def _sort_out(self, batch: list[_Waiting], results: Sequence[Exception | None]) -> JournalError | None:
        """Keep the events that may be written later, drop those that never can; returns why the former were not."""
        late: list[_Waiting] = []
        why: JournalError | None = None
        for (held, row), error in zip(batch, results, strict=True):
            if isinstance(error, ClaimLost):
                logger.info("an event of %s is another service's to tell", row["topic"])
            elif isinstance(error, UnstorableError):
                logger.error("an event of %s cannot be stored and is left out: %s", row["topic"], error)
            elif error is not None:
                late.append((held, row))
                why = error if isinstance(error, JournalError) else JournalError(f"cannot write events: {error}")
        self._waiting = late + self._waiting
        return why

    def _again(self) -> None:
        """Write what could not be written, also if nothing new comes."""
        if self._waiting and self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())

    def _insert(self, rows: Sequence[_Waiting]) -> list[Exception | None]:
        """Write rows together; returns for each why it was not written."""

        def write(part: Sequence[_Waiting]) -> list[Exception | None]:
            with self._journal.writing("write events") as connection:
                lost = claims.lost(connection, {held for held, _ in part if held is not None})
                if kept := [row for held, row in part if held not in lost]:
                    connection.execute(insert(events), kept)
            return [ClaimLost("another service tells") if held in lost else None for held, _ in part]

        return write_apart(write, rows)

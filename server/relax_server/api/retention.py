"""Old events are let go, so that the log of events does not grow for ever."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sqlalchemy import case, delete, func, select

from relax_sdk.errors import RelaxError
from relax_server.api.core import ServiceCore
from relax_server.api.logs import say
from relax_server.api.sessions import SessionHub
from relax_server.journal.schema import events, rollouts
from relax_server.journal.sql import SqlJournal

logger = logging.getLogger(__name__)

DAY = 86_400.0
LOOK, BATCH = 500, 1000
"""Events that are looked at in one transaction, and deleted in one."""
PAUSE = 0.05
"""Seconds between two transactions, in which others may write."""
SILENT = 2 * DAY
"""After so many seconds without an event, if that is longer than events are kept, a session's server must have been killed:
each tells of its open sessions once a day."""


class Retention:
    """Prunes the events of what ended long ago, at the start and then daily; of several workers the first one does.

    What is unfinished keeps all its events. Rows of rollouts stay, and so do trajectories.

    Args:
        core: of the service.
        hub: its sessions.
        clock: Unix seconds.
    """

    def __init__(self, core: ServiceCore, hub: SessionHub, clock: Callable[[], float] = time.time) -> None:
        self.core, self.hub, self._clock = core, hub, clock

    async def run(self) -> None:
        """Go on for ever."""
        while True:
            try:
                for session in self.hub.unfinished:
                    self.core.events.add(session.topic, "open")
                number = await self.prune() if self.core.place.home else 0
                if number:
                    days = self.core.config.keep_events_days
                    say(f"pruned {number} events of what ended more than {days:g} days ago", events=number)
            except RelaxError as error:
                logger.warning("events cannot be pruned, which is tried again tomorrow: %s", error)
            await asyncio.sleep(DAY)

    async def prune(self) -> int:
        """Let go of what is old enough; returns how many events."""
        now = self._clock()
        before = now - self.core.config.keep_events_days * DAY
        silent, seq, number = min(before, now - SILENT), 0, 0
        while seq is not None:
            topics, seq = await self.core.ask(ended_topics, self.core.journal, seq, before, silent)
            while topics and (deleted := await self.core.ask(delete_events, self.core.journal, topics, before)):
                number += deleted
                await asyncio.sleep(PAUSE)
        return number


def ended_topics(journal: SqlJournal, seq: int, before: float, silent: float) -> tuple[list[str], int | None]:
    """Topics that ended, among those of the next events.

    Args:
        journal: whose events.
        seq: events up to this one were looked at.
        before: Unix seconds; what ended later is left out.
        silent: the same for sessions that never ended.

    Returns:
        They, and the number of the last event that was looked at; None when the others are too young.
    """
    e = events.c
    with journal.reading("look for old events") as connection:
        query = select(e.seq, e.topic, e.created_at).where(e.seq > seq).order_by(e.seq).limit(LOOK)
        rows = connection.execute(query).all()
        topics = sorted({row.topic for row in rows if row.created_at < before})
        if not topics:
            return [], None
        newest, finished = func.max(e.created_at), func.max(case((e.kind == "finished", 1), else_=0))
        query = select(e.topic, newest.label("newest"), finished.label("finished")).where(e.topic.in_(topics)).group_by(e.topic)
        found = connection.execute(query).all()
        ids = [row.topic.removeprefix("rollout/") for row in found if row.topic.startswith("rollout/")]
        over = select(rollouts.c.id).where(rollouts.c.id.in_(ids), rollouts.c.ended_at < before)
        ended = {f"rollout/{id}" for id in connection.scalars(over)}
    ended |= {row.topic for row in found if row.finished or (row.topic.startswith("session/") and row.newest < silent)}
    return [row.topic for row in found if row.newest < before and row.topic in ended], rows[-1].seq


def delete_events(journal: SqlJournal, topics: list[str], before: float) -> int:
    """Delete the oldest events of some topics; returns how many, 0 when none is left."""
    e = events.c
    with journal.writing("prune events") as connection:
        oldest = select(e.seq).where(e.topic.in_(topics), e.created_at < before).order_by(e.seq).limit(BATCH)
        seqs = list(connection.scalars(oldest))
        return connection.execute(delete(events).where(e.seq.in_(seqs))).rowcount if seqs else 0

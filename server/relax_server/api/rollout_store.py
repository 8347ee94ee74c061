"""Submitted rollouts in the journal's database, and which of the services on it plays each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from relax_sdk.errors import JournalError
from relax_server.api.holding import Holding
from relax_server.gateway.errors import ApiError
from relax_server.journal.schema import rollouts, trajectories
from relax_server.journal.sql import SqlJournal
from relax_server.rollout.failed_attempts import FAILED

ACTIVE = ("queued", "running", "paused")

_r = rollouts.c


@dataclass
class Rollout:
    """One submission."""

    id: str
    key: str
    """Id of the key that submitted it."""
    request: dict[str, Any]
    state: str
    """`queued`, `running`, `paused`, `completed`, `failed` or `cancelled`."""
    counts: dict[str, int]
    """`groups` in all, `done`, `unusable`, `failed` attempts at episodes, and `trajectories`."""
    error: str | None
    created_at: float
    ended_at: float | None = None

    @property
    def topic(self) -> str:
        """Topic of the rollout's events."""
        return f"rollout/{self.id}"

    @property
    def active(self) -> bool:
        """Whether it is not over."""
        return self.state in ACTIVE

    @property
    def ending(self) -> dict[str, Any] | None:
        """The data of its last event, `finished`; None: it is not over."""
        return None if self.ended_at is None else {"state": self.state, "counts": self.counts, "error": self.error}


class RolloutStore:
    """The table of rollouts as one service sees it. Methods block for as long as the database takes, and raise `JournalError`.

    Args:
        journal: whose database it is.
        holding: this service's claims.
        model: that it plays with; rollouts that were begun with another model are left alone.
        clock: Unix seconds.
    """

    def __init__(self, journal: SqlJournal, holding: Holding, model: str, clock: Callable[[], float] = time.time) -> None:
        self._journal, self.holding, self._model, self._clock = journal, holding, model, clock

    def insert(self, row: dict[str, Any], most: int) -> tuple[Rollout, bool]:
        """Add a rollout, claimed by this service; or find the one that the same key submitted under the same idempotency key.

        Args:
            row: of the table.
            most: rollouts that the key may have which are not over.

        Returns:
            It, and whether it is new.

        Raises:
            ApiError: 429; the key has as many as it may have.
        """
        try:
            with self._journal.writing("submit a rollout") as connection:  # where writers take turns
                known = self._repeated(connection, row)
                if known is not None:
                    return known, False
                _require_room(connection, row["key"], most)
                connection.execute(insert(rollouts).values(row | {"model": self._model}))
                self.holding.take(connection, row["id"])
            return _rollout(row), True
        except JournalError as error:
            if not isinstance(error.__cause__, IntegrityError) or row["idempotency_key"] is None:
                raise
        with self._journal.reading("find a rollout by its idempotency key") as connection:
            known = self._repeated(connection, row)
        assert known is not None
        return known, False

    def _repeated(self, connection: Connection, row: dict[str, Any]) -> Rollout | None:
        """The rollout that a request was sent for before, if it was."""
        if row["idempotency_key"] is None:
            return None
        query = select(rollouts).where(_r.key == row["key"], _r.idempotency_key == row["idempotency_key"])
        known = connection.execute(query).mappings().first()
        return _rollout(known) if known is not None else None

    def find(self, id: str) -> Rollout | None:
        """A rollout as it was last written."""
        with self._journal.reading(f"read rollout {id}") as connection:
            row = connection.execute(select(rollouts).where(_r.id == id)).mappings().first()
            return _rollout(row) if row is not None else None

    def newest(self, key: str | None, limit: int) -> list[Rollout]:
        """Rollouts of a key, or all, newest first."""
        query = select(rollouts).order_by(_r.created_at.desc()).limit(limit)
        if key is not None:
            query = query.where(_r.key == key)
        with self._journal.reading("list rollouts") as connection:
            return [_rollout(row) for row in connection.execute(query).mappings()]

    def durable(self, id: str, run: str) -> dict[str, tuple[int, list[dict[str, Any]]]]:
        """Task index and trajectories, as told in events, of the groups in the journal."""
        t = trajectories.c
        query = select(t.group_id, t.task_index, t.id, t.status, t.reward, t.rewards, t.n_tokens).order_by(t.seq)
        query = query.where(t.run == run, t.split != FAILED, t.group_id.startswith(f"{id}/", autoescape=True))
        found: dict[str, tuple[int, list[dict[str, Any]]]] = {}
        with self._journal.reading(f"find the groups of rollout {id}") as connection:
            for row in connection.execute(query).mappings():
                rows = found.setdefault(row["group_id"], (row["task_index"], []))[1]
                rows.append({name: row[name] for name in ("id", "status", "reward", "rewards", "n_tokens")})
        return found

    # -------------------------------------------------------------------------------------------------------- states

    def save(self, rollout: Rollout) -> bool:
        """Write the state of a rollout that this service has; False: it is over already, or another service has it."""
        with self._journal.writing(f"note the state of rollout {rollout.id}") as connection:
            if self.holding.lost(connection, rollout.id):
                return False
            # Read here, where writers take turns, so that the newest state is also the last one written.
            values = dict(state=rollout.state, counts=rollout.counts, error=rollout.error, ended_at=rollout.ended_at)
            if not rollout.active:
                self.holding.end(connection, rollout.id)
            active = and_(_r.id == rollout.id, _r.state.in_(ACTIVE))
            return connection.execute(update(rollouts).where(active).values(values)).rowcount == 1

    def switch(self, id: str, state: str) -> Rollout:
        """Give a rollout another state whoever plays it, which that service will see; one that is over stays as it is."""
        values: dict[str, Any] = {"state": state} | ({} if state in ACTIVE else {"ended_at": self._clock()})
        with self._journal.writing(f"switch rollout {id}") as connection:
            connection.execute(update(rollouts).where(_r.id == id, _r.state.in_(ACTIVE)).values(values))
            if state not in ACTIVE:
                self.holding.end(connection, id)
            return _rollout(connection.execute(select(rollouts).where(_r.id == id)).mappings().one())

    # ------------------------------------------------------------------------------------------------- who plays what

    def free(self) -> list[tuple[str, str, bool]]:
        """Unfinished rollouts that may be taken, oldest first.

        Returns:
            Id, environment, and whether it was this service's in an earlier life.
        """
        query = select(_r.id, _r.request).where(self._may_be_played()).order_by(_r.created_at)
        with self._journal.reading("find unfinished rollouts") as connection:
            rows = connection.execute(query).all()
            free = self.holding.free(connection, [row.id for row in rows])
        return [(row.id, row.request["env"], free[row.id]) for row in rows if row.id in free]

    def take(self, ids: Sequence[str]) -> list[Rollout]:
        """Claim rollouts that are free; returns those that still were."""
        with self._journal.writing("take rollouts") as connection:
            rows = connection.execute(select(rollouts).where(_r.id.in_(ids), self._may_be_played())).mappings().all()
            taken = [_rollout(row) for row in rows if self.holding.take(connection, row["id"])]
            mine = _r.id.in_([rollout.id for rollout in taken])
            connection.execute(update(rollouts).where(mine).values(model=self._model))
        return taken

    def renew(self, playing: Sequence[Rollout]) -> dict[str, str]:
        """Give a sign of life, and write counts; returns the states of those that this service still has, or that are over."""
        with self._journal.writing("hold on to rollouts") as connection:
            mine = self.holding.beat(connection, [rollout.id for rollout in playing])
            for rollout in playing:
                if rollout.id in mine:
                    connection.execute(update(rollouts).where(_r.id == rollout.id).values(counts=rollout.counts))
            query = select(_r.id, _r.state).where(_r.id.in_([rollout.id for rollout in playing]))
            states = dict(connection.execute(query).tuples().all())
        return {id: state for id, state in states.items() if id in mine or state not in ACTIVE}

    def release(self) -> None:
        """Let other services have what this one played."""
        with self._journal.writing("let go of rollouts") as connection:
            self.holding.release(connection)

    def _may_be_played(self) -> ColumnElement[bool]:
        return and_(_r.state.in_(ACTIVE), or_(_r.model.is_(None), _r.model == self._model))


def _require_room(connection: Connection, key: str, most: int) -> None:
    under_way = select(func.count()).where(_r.key == key, _r.state.in_(ACTIVE))
    if connection.execute(under_way).scalar_one() >= most:
        message = f"the key has {most} rollouts that are not over, as many as one may have; wait for one, or cancel it"
        raise ApiError(429, message, "rollouts", headers={"Retry-After": "5"})


def _rollout(row: Any) -> Rollout:
    names = ("id", "key", "request", "state", "counts", "created_at")
    return Rollout(**{name: row[name] for name in names}, error=row.get("error"), ended_at=row.get("ended_at"))

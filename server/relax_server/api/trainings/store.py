"""Submitted training runs in the journal's database."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from relax_server.api.keys import Key
from relax_server.gateway.errors import ApiError
from relax_server.journal.schema import trainings
from relax_server.journal.sql import SqlJournal

ACTIVE = ("queued", "waiting", "running")


@dataclasses.dataclass
class Training:
    """One submitted run."""

    id: str
    key: str
    """Id of the key that submitted it."""
    request: dict[str, Any]
    state: str
    """`queued`, `waiting` (for the host of its environment), `running`, `completed`, `failed` or `cancelled`."""
    step: int
    server: str
    """The server that carries it out, and has what it makes."""
    error: str | None
    created_at: float
    ended_at: float | None = None

    @property
    def topic(self) -> str:
        """Topic of the run's events."""
        return f"run/{self.id}"

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self.state not in ACTIVE


class TrainingStore:
    """The table of runs. Methods block for as long as the database takes, and raise `JournalError`.

    Args:
        journal: whose database it is.
        server: this one; it carries out what it was sent.
    """

    def __init__(self, journal: SqlJournal, server: str) -> None:
        self._journal, self._server = journal, server

    def insert(self, row: dict[str, Any], key: Key) -> tuple[Training, bool]:
        """Add a run, or find the one that the same key submitted under the same idempotency key; and whether it is new.

        Raises:
            ApiError: 429; the key has as many runs as it may have.
        """
        row, word = row | {"server": self._server}, row["idempotency_key"]
        with self._journal.writing("submit a run") as connection:  # where writers take turns
            if word is not None:
                query = select(trainings).where(trainings.c.key == key.id, trainings.c.idempotency_key == word)
                if (known := connection.execute(query).mappings().first()) is not None:
                    return _training(known), False
            _require_room(connection, key)
            connection.execute(insert(trainings).values(row))
        return _training(row), True

    def unfinished(self) -> Sequence[Training]:
        """Runs of this server that are not over, oldest first."""
        query = select(trainings).where(trainings.c.state.in_(ACTIVE), trainings.c.server == self._server)
        with self._journal.reading("find unfinished runs") as connection:
            return [_training(row) for row in connection.execute(query.order_by(trainings.c.created_at)).mappings()]

    def require_room(self, key: Key) -> None:
        """Refuse a key that may have no further run.

        Raises:
            ApiError: 429; it has as many as it may have.
        """
        with self._journal.reading("count the runs of a key") as connection:
            _require_room(connection, key)

    def get(self, id: str) -> Training | None:
        """A run, if there is one."""
        with self._journal.reading(f"read run {id}") as connection:
            row = connection.execute(select(trainings).where(trainings.c.id == id)).mappings().first()
            return _training(row) if row is not None else None

    def list(self, key: str | None, limit: int) -> Sequence[Training]:
        """Runs of a key, or all, newest first."""
        query = select(trainings).order_by(trainings.c.created_at.desc()).limit(limit)
        if key is not None:
            query = query.where(trainings.c.key == key)
        with self._journal.reading("list runs") as connection:
            return [_training(row) for row in connection.execute(query).mappings()]

    def note(self, training: Training) -> None:
        """Write down where a run is."""
        values = {name: getattr(training, name) for name in ("state", "step", "error", "ended_at")}
        with self._journal.writing(f"note the state of run {training.id}") as connection:
            connection.execute(update(trainings).where(trainings.c.id == training.id).values(values))


def _require_room(connection: Connection, key: Key) -> None:
    under_way = select(func.count()).where(trainings.c.key == key.id, trainings.c.state.in_(ACTIVE))
    if connection.execute(under_way).scalar_one() >= key.runs:
        message = f"key {key.name!r} has {key.runs} training runs under way already, those that wait included; end one first"
        raise ApiError(429, message, "runs", headers={"Retry-After": "60"})


def _training(row: Any) -> Training:
    names = ("id", "key", "request", "state", "step", "server", "created_at")
    return Training(**{name: row[name] for name in names}, error=row.get("error"), ended_at=row.get("ended_at"))

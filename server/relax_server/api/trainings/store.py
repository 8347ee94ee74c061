"""Submitted training runs in the journal's database."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from relax_server.api.holding import Holding
from relax_server.api.keys import Key
from relax_server.gateway.errors import ApiError
from relax_server.journal import claims
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

    @property
    def ending(self) -> dict[str, Any] | None:
        """The data of its last event, `finished`; None: it is not over."""
        return {"state": self.state, "step": self.step, "error": self.error} if self.over else None


class TrainingStore:
    """The table of runs. Methods block for as long as the database takes, and raise `JournalError`.

    Args:
        journal: whose database it is.
        server: this one's name.
        holding: its claims; it carries out what it was sent, or what another one left.
    """

    def __init__(self, journal: SqlJournal, server: str, holding: Holding) -> None:
        self._journal, self._server, self.holding = journal, server, holding

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
            self.holding.take(connection, row["id"])
        return _training(row), True

    def free(self) -> list[tuple[Training, bool]]:
        """Runs that are not over and may be taken, oldest first; and whether each was this server's in an earlier life."""
        query = select(trainings).where(trainings.c.state.in_(ACTIVE)).order_by(trainings.c.created_at)
        with self._journal.reading("find unfinished runs") as connection:
            found = [_training(row) for row in connection.execute(query).mappings()]
            free = self.holding.free(connection, [training.id for training in found])
        return [(training, free[training.id]) for training in found if training.id in free]

    def take(self, training: Training) -> bool:
        """Claim a run that is free; False: it is over, or another server was faster."""
        with self._journal.writing(f"take run {training.id}") as connection:
            mine = (trainings.c.id == training.id) & trainings.c.state.in_(ACTIVE)
            if connection.scalar(select(trainings.c.id).where(mine)) is None or not self.holding.take(connection, training.id):
                return False
            connection.execute(update(trainings).where(mine).values(server=self._server))
        training.server = self._server
        return True

    def reopen(self, training: Training, key: Key) -> None:
        """Claim a run that is over, which is under way again then.

        Raises:
            ApiError: 429, its key has as many runs as it may have; 409, it is under way again already.
        """
        again = dict(state="queued", error=None, ended_at=None, server=self._server)
        with self._journal.writing(f"go on with run {training.id}") as connection:
            _require_room(connection, key)
            over = (trainings.c.id == training.id) & trainings.c.state.not_in(ACTIVE)
            if connection.execute(update(trainings).where(over).values(again)).rowcount == 0:
                raise ApiError(409, f"run {training.id} is under way again already", "state")
            self.holding.take(connection, training.id)
        for name, value in again.items():
            setattr(training, name, value)

    def renew(self, carried_out: Sequence[Training]) -> dict[str, str]:
        """Give a sign of life, and write steps; returns the states of the runs that this server still has."""
        with self._journal.writing("hold on to runs") as connection:
            mine = self.holding.beat(connection, [training.id for training in carried_out])
            for training in carried_out:
                if training.id in mine:
                    connection.execute(update(trainings).where(trainings.c.id == training.id).values(step=training.step))
            query = select(trainings.c.id, trainings.c.state).where(trainings.c.id.in_(mine))
            return dict(connection.execute(query).tuples().all())

    def cancel(self, id: str) -> Training:
        """End a run whoever carries it out, which that server will see; one that is over stays as it is."""
        with self._journal.writing(f"cancel run {id}") as connection:
            active = (trainings.c.id == id) & trainings.c.state.in_(ACTIVE)
            connection.execute(update(trainings).where(active).values(state="cancelled", ended_at=time.time()))
            self.holding.end(connection, id)
            return _training(connection.execute(select(trainings).where(trainings.c.id == id)).mappings().one())

    def release(self) -> None:
        """Let other servers have what this one carried out."""
        with self._journal.writing("let go of runs") as connection:
            self.holding.release(connection)

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
        """Write down where a run is.

        Raises:
            ClaimLost: another server has it, or it is over.
        """
        values = {name: getattr(training, name) for name in ("state", "step", "error", "ended_at")}
        with self._journal.writing(f"note the state of run {training.id}") as connection:
            claims.check(connection, self.holding.held(training.id))
            connection.execute(update(trainings).where(trainings.c.id == training.id).values(values))
            if training.over:
                self.holding.end(connection, training.id)


def _require_room(connection: Connection, key: Key) -> None:
    under_way = select(func.count()).where(trainings.c.key == key.id, trainings.c.state.in_(ACTIVE))
    if connection.execute(under_way).scalar_one() >= key.runs:
        message = f"key {key.name!r} has {key.runs} training runs under way already, those that wait included; end one first"
        raise ApiError(429, message, "runs", headers={"Retry-After": "60"})


def _training(row: Any) -> Training:
    names = ("id", "key", "request", "state", "step", "server", "created_at")
    return Training(**{name: row[name] for name in names}, error=row.get("error"), ended_at=row.get("ended_at"))

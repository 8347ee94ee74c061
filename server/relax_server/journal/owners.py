"""The owner of a run, as SQL inside one transaction: who used its name first; nobody else may write to it."""

from __future__ import annotations

from sqlalchemy import Connection, insert, select

from relax_server.journal.schema import runs


def take(connection: Connection, run: str, owner: str | None, now: float) -> bool:
    """Use a run's name, which makes the run the owner's if it is new.

    Args:
        connection: of a transaction that writes.
        run: its name.
        owner: id of a key; None: a training program, which needs none.
        now: Unix seconds.

    Returns:
        Whether it is the owner's.
    """
    found = connection.execute(select(runs.c.owner).where(runs.c.id == run)).first()
    if found is None:
        connection.execute(insert(runs).values(id=run, created_at=now, owner=owner))
        return True
    return found.owner == owner

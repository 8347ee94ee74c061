"""The journal: finished groups, durable, leased to the trainer and acked by checkpoint."""

from __future__ import annotations

import os
import time
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from relax_sdk.errors import JournalError
from relax_server.journal import migrate, postgres, sqlite
from relax_server.journal.sql import Clock, SqlJournal

__all__ = ["open_journal", "revision_of"]

BUSY_SECONDS = 30.0
"""Seconds that a call waits for a writer in another process, if nothing else is said."""


def open_journal(
    url_or_path: str | os.PathLike[str],
    *,
    claim: str | None = None,
    busy_timeout: float = BUSY_SECONDS,
    clock: Clock = time.time,
    read_only: bool = False,
) -> SqlJournal:
    """Open a journal; a new one is made with its folder, an older one is migrated.

    Args:
        url_or_path: a file such as `runs/tone/journal.db`, or `sqlite:///` and a path, on a local disk, since SQLite's locks do
            not work over a network file system; for several servers `postgresql://user@host/database`.
        claim: `Holder.id` of the program that carries a run out, for its roles: they are refused once another one has the run.
        busy_timeout: seconds that a call waits for a writer in another process before it raises.
        clock: Unix seconds; what leases go by.
        read_only: look at it beside the program that writes it: nothing is made, migrated or locked, and what writes raises.

    Raises:
        JournalError: it cannot be opened or made, is not a journal, or was written by a newer version; with `read_only` also:
            there is none, or it was written by an older version.
    """
    where = _where(url_or_path)
    if isinstance(where, Path) and read_only:
        if not where.is_file():
            raise JournalError(f"there is no journal {where}")
    elif isinstance(where, Path):
        try:
            where.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise JournalError(
                f"the folder of journal {where} cannot be made ({error.strerror}); name another place"
            ) from error
    return SqlJournal(where, claim=claim, busy_timeout=busy_timeout, clock=clock, read_only=read_only)


def revision_of(url_or_path: str | os.PathLike[str]) -> str | None:
    """The revision that a journal's schema is at, as in `schema.HEAD`; None: a database without one. Nothing is changed.

    Args:
        url_or_path: as in `open_journal`.

    Raises:
        JournalError: there is none, or it cannot be read.
    """
    where = _where(url_or_path)
    if isinstance(where, Path) and not where.is_file():
        raise JournalError(f"there is no journal {where}")
    database = sqlite if isinstance(where, Path) else postgres
    engine = database.connect(str(where), BUSY_SECONDS)
    try:
        with engine.connect() as connection, connection.begin():
            return migrate.revision(connection)
    except SQLAlchemyError as error:
        name = str(where) if isinstance(where, Path) else postgres.shown(where)
        raise database.explain(error, "read its revision", name, BUSY_SECONDS) from error
    finally:
        engine.dispose()


def _where(url_or_path: str | os.PathLike[str]) -> Path | str:
    """The file, absolute, or the URL of a PostgreSQL database.

    Raises:
        JournalError: it names neither.
    """
    given = os.fspath(url_or_path)
    if given.startswith(("postgresql://", "postgres://")):
        return "postgresql://" + given.partition("://")[2]
    path = Path(os.path.abspath(_file(given)))
    if path.is_dir():
        raise JournalError(f"{path} is a folder; name a file in it, such as {path / 'journal.db'}")
    return path


def _file(url_or_path: str) -> str:
    scheme, found, rest = url_or_path.partition("://")
    if not found:
        file = url_or_path
    elif scheme != "sqlite":
        raise JournalError(f"{scheme}:// journals are not supported; name a file, or postgresql://user@host/database")
    else:
        file = rest.removeprefix("/")
    if file in ("", ":memory:"):
        raise JournalError(f"{url_or_path!r} names no file, and a journal in memory would not be durable")
    return file

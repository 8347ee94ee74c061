"""Brings a database to the newest revision; safe when several processes open it at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, inspect, text

from relax_sdk.errors import JournalError
from relax_server.journal import migrations, sqlite
from relax_server.journal.schema import HEAD


def upgrade(engine: Engine, target: str = HEAD, write: Mapping[str, Any] = sqlite.WRITE) -> None:
    """Run the revisions that are missing, all in one transaction that no other process can enter.

    Args:
        engine: where.
        target: the revision to stop at; tests begin at an older one.
        write: execution options of a connection whose transactions write.

    Raises:
        JournalError: the database is newer than this code, or is not a journal.
        SQLAlchemyError: it cannot be read or written.
    """
    with engine.connect() as connection, connection.begin():
        if revision(connection) == target:
            return
    with engine.connect().execution_options(**write) as connection, connection.begin():
        found = revision(connection)  # another process may have been first
        if found != target:
            _check(connection, found)
            _run(connection, target)


def require_current(engine: Engine) -> None:
    """Refuse a database that is not at the newest revision, as one that is only read is not migrated.

    Raises:
        JournalError: it is older or newer than this code, or is not a journal.
        SQLAlchemyError: it cannot be read.
    """
    with engine.connect() as connection, connection.begin():
        found = revision(connection)
        if found != HEAD:
            _check(connection, found)
            raise JournalError(
                f"journal {connection.engine.url.database} was written by an older version of Relax Gym (revision "
                f"{found or 'none'}, this version reads {HEAD}) and is not migrated while only looked at: look at it with "
                "the version that wrote it"
            )


def revision(connection: Connection) -> str | None:
    """The revision a database is at; None before the first."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _check(connection: Connection, found: str | None) -> None:
    file = connection.engine.url.database
    if found is None:
        if tables := inspect(connection).get_table_names():
            raise JournalError(f"{file} is a database of something else (tables {', '.join(tables[:5])}); name another file")
    elif not any(_versions().glob(f"{found}_*.py")):
        raise JournalError(
            f"journal {file} was written by a newer version of Relax Gym (revision {found}, this version knows up to {HEAD}): "
            "upgrade Relax Gym, or name another file"
        )


def _run(connection: Connection, target: str) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_versions().parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, target)


def _versions() -> Path:
    return Path(migrations.__path__[0]) / "versions"

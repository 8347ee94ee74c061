"""All that is particular to PostgreSQL: connections, locking, and what its errors mean."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from relax_sdk.errors import JournalError
from relax_server.json_form import json_text

_BEGIN = "relax_begin"
WRITE = {_BEGIN: "write"}
"""Execution options of a connection whose transactions write."""
LOCK = 7_311_984_021
"""The advisory lock of writers: any number that nobody else in the database uses."""
CONNECT_SECONDS = 10


def connect(url: str, busy_timeout: float, read_only: bool = False) -> Engine:
    """An engine over one database.

    Writers take turns, over all servers, by an advisory lock that their transaction holds: what the lease rules promise they
    promise for one writer at a time, and `seq` is the order of commits. Readers wait for nobody.

    Args:
        url: `postgresql://user:password@host/database`.
        busy_timeout: seconds to wait for another writer.
        read_only: the database refuses to write for this engine.

    Raises:
        JournalError: the URL cannot be understood, or the driver is not installed.
    """
    try:
        whole = make_url(url).set(drivername="postgresql+psycopg")
        engine = create_engine(
            whole,
            pool_size=4,
            max_overflow=60,
            pool_timeout=max(busy_timeout, 1.0),
            pool_pre_ping=True,
            json_serializer=json_text,
            connect_args={"connect_timeout": CONNECT_SECONDS}
            | ({"options": "-c default_transaction_read_only=on"} if read_only else {}),
        )
    except ModuleNotFoundError as error:
        raise JournalError(f"PostgreSQL journals need psycopg: pip install 'relax-gym[postgres]' ({error})") from error
    except SQLAlchemyError as error:
        raise JournalError(f"{shown(url)} is not a database URL ({error}); write postgresql://user@host/database") from error

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get(_BEGIN) == "write":
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = {round(busy_timeout * 1000)}")
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({LOCK})")

    return engine


def prepare(engine: Engine, busy_timeout: float) -> None:
    """Prepare the database; PostgreSQL needs nothing switched on."""


def shown(url: str) -> str:
    """A URL without its password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except SQLAlchemyError:
        return url.partition("://")[0] + "://…"


def explain(error: SQLAlchemyError, doing: str, name: str, busy_timeout: float) -> JournalError:
    """Say what went wrong with the database, and what to do."""
    cause: Any = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlstate", None) or ""
    for prefix, text in {
        "55P03": f"stayed locked by another writer for {busy_timeout:g} s: end that server, or raise busy_timeout",
        "53100": "has no room, the disk is full: free some and repeat; what was committed before is safe",
        "53": "has no resources left for this: see its log",
        "25006": "is read-only: it was opened for reading, or connect to the primary server",
        "28": "does not let this user in: check user and password",
        "3D000": "does not exist: make it with `createdb`",
        "42501": "does not allow this user to do it: grant rights on the schema",
        "57P": "is shutting down or was restarted: repeat in a moment",
        "XX": "is damaged: see its log",
    }.items():
        if code.startswith(prefix):
            return JournalError(f"cannot {doing}: journal {name} {text} ({code})")
    if (not code and isinstance(error, DBAPIError) and error.connection_invalidated) or "connect" in str(cause).lower():
        return JournalError(f"cannot {doing}: journal {name} cannot be reached: start the database, or check its URL ({cause})")
    return JournalError(f"cannot {doing}: journal {name}: {cause}")

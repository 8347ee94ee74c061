"""All that is particular to SQLite: connections, locking, and what its errors mean."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from relax_sdk.errors import JournalError
from relax_sdk.retrying import growing_pauses
from relax_server.json_form import json_text

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.1
"""Seconds before a file that another process is opening is asked for again: the first, and the longest."""
_BEGIN = "relax_begin"
WRITE = {_BEGIN: "BEGIN IMMEDIATE"}
"""Execution options of a connection whose transactions write."""


def connect(path: Path | str, busy_timeout: float, read_only: bool = False) -> Engine:
    """An engine over one database file; the file is made when first used, unless it is only to be read.

    Durability: write-ahead log with `synchronous=FULL`, so a commit that returned survives a power cut.
    A writing transaction takes the write lock at its start (`BEGIN IMMEDIATE`): a reader that turns into a writer could
    be refused halfway.

    Args:
        path: absolute.
        busy_timeout: seconds to wait for another writer.
        read_only: nothing can be written, and closing leaves the write-ahead log to the program that writes.
    """
    url = URL.create("sqlite", database=str(path))
    if read_only:
        url = URL.create("sqlite", database=f"file:{quote(str(path))}", query={"uri": "true", **_reading(Path(path))})
    engine = create_engine(url, pool_size=4, max_overflow=60, pool_timeout=max(busy_timeout, 1.0), json_serializer=json_text)

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, record: Any) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves, below
        connection.execute(f"PRAGMA busy_timeout = {round(busy_timeout * 1000)}")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if statement := connection.get_execution_options().get(_BEGIN, "BEGIN"):
            connection.exec_driver_sql(statement)

    return engine


def _reading(path: Path) -> dict[str, str]:
    """How a file is opened for reading: one in a folder that is not ours to write, and that nobody writes, as it is."""
    still = not os.access(path.parent, os.W_OK) and not path.with_name(path.name + "-wal").exists()
    return {"mode": "ro"} | ({"immutable": "1"} if still else {})


def prepare(engine: Engine, busy_timeout: float) -> None:
    """Switch the file to a write-ahead log, once in its life.

    SQLite refuses the switch at once while another process is opening the same new file, so it is tried until
    `busy_timeout` has passed.

    Raises:
        SQLAlchemyError: refused.
    """
    deadline = time.monotonic() + busy_timeout
    for pause in growing_pauses(FIRST_PAUSE, LONGEST_PAUSE):
        try:
            with engine.connect().execution_options(**{_BEGIN: None}) as connection:
                connection.exec_driver_sql("PRAGMA journal_mode = WAL")
                return
        except OperationalError as error:
            if not _code(error).startswith("SQLITE_BUSY") or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)


def explain(error: SQLAlchemyError, doing: str, name: str, busy_timeout: float) -> JournalError:
    """Say what went wrong with the file, and what to do."""
    code = _code(error)
    for prefix, text in {
        "SQLITE_BUSY": f"stayed locked by another process for {busy_timeout:g} s: end that process, or raise busy_timeout",
        "SQLITE_READONLY": "cannot be written: allow writing to the file and to its folder, or put the journal elsewhere",
        "SQLITE_CANTOPEN": "cannot be opened or created: allow writing to its folder, or put the journal elsewhere",
        "SQLITE_FULL": "has no room, the disk is full: free some and repeat; what was committed before is safe",
        "SQLITE_NOTADB": "is not a journal, or its first page is damaged: restore it from a copy, or name another file",
        "SQLITE_CORRUPT": "is damaged: restore it from a copy, or save what can be read with `sqlite3 FILE .recover`",
        "SQLITE_IOERR": "cannot be read or written, the disk reports an error: check it",
    }.items():
        if code.startswith(prefix):
            return JournalError(f"cannot {doing}: journal {name} {text} ({code})")
    cause = error.orig if isinstance(error, DBAPIError) else error
    return JournalError(f"cannot {doing}: journal {name}: {cause}")


def _code(error: SQLAlchemyError) -> str:
    cause = error.orig if isinstance(error, DBAPIError) else None
    return getattr(cause, "sqlite_errorname", "")

"""Copies of a service's data that can be restored, made while it runs.

A copy is a folder with `backup.json`, the service's files, and its journal: an SQLite file made by SQLite's online backup,
or `journal.dump` made by `pg_dump`. The journal is copied first: media lie in the store before a trajectory names them, so
the copy has every item that its journal names.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from sqlalchemy import URL, make_url

from relax_sdk.errors import ConfigError, JournalError
from relax_server.journal.schema import HEAD

MANIFEST, DUMP = "backup.json", "journal.dump"
SKIPPED = frozenset({"logs", "server.id"})
"""Names in a service's folder that are no data."""
DUMP_SECONDS = 24 * 3600.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Backup:
    """What a copy says of itself."""

    made_at: float
    """Unix seconds."""
    relax_gym: str
    """Version that made it."""
    revision: str
    """Newest revision of the journal's schema that this version knows."""
    journal: Literal["sqlite", "postgresql"]


def backup(folder: Path, journal: str | None, to: Path, say: Say) -> Backup:
    """Copy a service's data into a new folder; the service may run meanwhile.

    Args:
        folder: of the service.
        journal: URL of its database; None: the file in `folder`.
        to: a folder that does not exist yet, or is empty.
        say: tells people how far it is.

    Raises:
        ConfigError: `folder` is no service's, or `to` is not empty or cannot be written.
        JournalError: the database cannot be copied.
    """
    remote = journal is not None and journal.startswith("postgres")
    if not folder.is_dir() or not (remote or (folder / "journal.db").is_file()):
        raise ConfigError(f"{folder} is not the folder of a service; name it with --folder, and its database with --journal")
    _empty(to)
    with _told(to):
        if remote:
            say("copying the database")
            _pg(["pg_dump", "--format=custom", f"--file={to / DUMP}"], str(journal))
        files = _databases_first(folder)
        say(f"copying {len(files)} files")
        for file in files:
            target = to / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _copy(file, target, say)
        made = Backup(time.time(), version("relax-gym"), HEAD, "postgresql" if remote else "sqlite")
        (to / MANIFEST).write_text(json.dumps(asdict(made), indent=1) + "\n")
    return made


def restore(source: Path, folder: Path, journal: str | None, say: Say) -> Backup:
    """Bring back what `backup` copied.

    Args:
        source: of `backup`.
        folder: for the service; it does not exist yet, or is empty.
        journal: URL of an empty database, for a copy of one.
        say: tells people how far it is.

    Raises:
        ConfigError: `source` is no copy, or `folder` is not empty or cannot be written, or `journal` does not fit.
        JournalError: the database cannot be written.
    """
    try:
        made = Backup(**json.loads((source / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{source} is not a backup: it has no readable {MANIFEST} ({error})") from error
    if (made.journal == "postgresql") != (journal is not None):
        how = "of a PostgreSQL journal; name an empty database" if made.journal == "postgresql" else "of a file; leave out"
        raise ConfigError(f"{source} is a copy {how} with --journal")
    _empty(folder)
    with _told(folder):
        files = [file for file in sorted(source.rglob("*")) if file.is_file() and file.name not in (MANIFEST, DUMP)]
        say(f"restoring {len(files)} files")
        for file in files:
            target = folder / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.copy2(file, target)
    if journal is not None:  # last, and all at once: what breaks off leaves it empty, and can be repeated
        say("restoring the database")
        try:
            _pg(["pg_restore", "--exit-on-error", "--no-owner", "--single-transaction", str(source / DUMP)], journal)
        except JournalError as error:
            raise JournalError(f"{error}; nothing of the copy is in the database: remove {folder}, and repeat") from error
    return made


def _databases_first(folder: Path) -> list[Path]:
    """The files to copy: SQLite files before all others."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and not file.is_symlink()]
    files = [file for file in files if file.relative_to(folder).parts[0] not in SKIPPED]
    files = [file for file in files if not file.name.endswith((".db-wal", ".db-shm", ".db-journal"))]
    return sorted(files, key=lambda file: file.suffix != ".db")


def _copy(file: Path, target: Path, say: Say) -> None:
    """Copy a file; one that vanished meanwhile was no longer wanted."""
    if file.suffix != ".db":
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(file, target)
        return
    say(f"copying {file.name}")
    try:
        reading = f"{file.absolute().as_uri()}?mode=ro"
        with (
            contextlib.closing(sqlite3.connect(reading, uri=True)) as source,
            contextlib.closing(sqlite3.connect(target)) as copy,
        ):
            source.backup(copy)  # all in one go: in steps it would begin again after each commit; writers wait for no reader
            found = copy.execute("PRAGMA quick_check").fetchone()
    except sqlite3.Error as error:
        raise JournalError(f"cannot copy {file}: {error}") from error
    if found != ("ok",):
        raise JournalError(f"the copy of {file} is damaged ({found[0]}); check the disk, and repeat")


def _pg(command: list[str], url: str) -> None:
    """Run a program of PostgreSQL on a database; the password is not on its command line, which others can read.

    Raises:
        JournalError: it is not installed, or failed.
    """
    whole = make_url(url.replace("postgres://", "postgresql://", 1))
    env = os.environ | ({"PGPASSWORD": whole.password} if whole.password else {})
    plain = URL.create("postgresql", whole.username, None, whole.host, whole.port, whole.database, whole.query)
    try:
        done = subprocess.run(
            [command[0], f"--dbname={plain.render_as_string()}", *command[1:]],
            env=env,
            capture_output=True,
            text=True,
            timeout=DUMP_SECONDS,
        )
    except FileNotFoundError as error:
        raise JournalError(f"{command[0]} is not installed; it comes with PostgreSQL's client programs") from error
    except subprocess.TimeoutExpired as error:
        raise JournalError(f"{command[0]} did not end within {DUMP_SECONDS:g} s") from error
    if done.returncode != 0:
        raise JournalError(f"{command[0]} failed: {done.stderr.strip()[-1000:]}")


def _empty(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = next(folder.iterdir(), None)
    except OSError as error:
        raise ConfigError(f"folder {folder} cannot be used ({error.strerror}); name another") from error
    if found is not None:
        raise ConfigError(f"{folder} is not empty (it has {found.name}); name a new folder")


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    """An error of the file system says which folder, and what to do."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror}); free some room, empty it, and repeat") from error

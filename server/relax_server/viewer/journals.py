"""Journals that are only looked at: opened once, a bounded number at a time, and closed by the last one who has used them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from relax_sdk.errors import ConfigError, JournalError
from relax_sdk.run_lock import Holder, RunLock
from relax_server.journal import open_journal, revision_of
from relax_server.journal.schema import HEAD
from relax_server.journal.sql import SqlJournal

OPEN = 8
"""Journals that stay open; each holds a few connections."""
BUSY_SECONDS = 5.0
"""Seconds that a page waits for a writer that holds the journal."""


class Journals:
    """Journals by file or URL; safe to use from several threads."""

    def __init__(self, most: int = OPEN) -> None:
        self._most = most
        self._open: OrderedDict[str, SqlJournal] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, where: str | Path, folder: Path | None = None) -> SqlJournal | None:
        """The journal at a place; None: there is no file yet.

        Args:
            where: a file, or the URL of a PostgreSQL database.
            folder: of the run that it belongs to alone; then one of an older version is migrated, if nobody writes it.

        Raises:
            JournalError: it cannot be read, or was written by another version.
        """
        if isinstance(where, Path) and not where.is_file():
            return None
        with self._lock:
            found = self._open.get(str(where))
            if found is None:
                if folder is not None:
                    _migrate(Path(where), folder)
                found = self._open[str(where)] = open_journal(where, busy_timeout=BUSY_SECONDS, read_only=True)
            self._open.move_to_end(str(where))
            while len(self._open) > self._most:
                # Whoever still reads from it keeps its connection; the rest is let go.
                self._open.popitem(last=False)[1].engine.dispose()
            return found

    def close(self) -> None:
        """Close all."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()


def _migrate(file: Path, folder: Path) -> None:
    """Bring the journal of a run that nobody carries out to this version; any other is left as it is."""
    found = revision_of(file)
    if found is None or found >= HEAD:
        return
    lock = RunLock(folder, Holder.here())
    try:
        lock.acquire()
    except ConfigError as error:
        raise JournalError(
            f"journal {file} was written by an older version of Relax Gym (revision {found}), which is writing it still or "
            f"cannot be told from one that is: {error}"
        ) from error
    try:
        open_journal(file, busy_timeout=BUSY_SECONDS).close()
    finally:
        lock.release()

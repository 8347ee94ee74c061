"""Which server this is: the same one when it is started again in its folder."""

from __future__ import annotations

import fcntl
import secrets
from pathlib import Path

from relax_sdk.errors import ConfigError


class Identity:
    """A server's name, kept in its folder and locked there while the process lives.

    A second server in the same folder gets a name for itself alone, so that no two take each other for the same. Each worker
    of a service has a name of its own.

    Args:
        folder: of the service.
        worker: number of the worker.

    Raises:
        ConfigError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, worker: int = 0) -> None:
        fresh = f"srv_{secrets.token_hex(6)}"
        try:
            self._file = (folder / (f"server-{worker}.id" if worker else "server.id")).open("a+")
        except OSError as error:
            raise ConfigError(f"folder {folder} cannot be written to ({error.strerror}); name another") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.id = fresh
            return
        self._file.seek(0)
        self.id = self._file.read().strip() or fresh
        self._file.seek(0)
        self._file.truncate()
        self._file.write(self.id)
        self._file.flush()

    def close(self) -> None:
        """Let another process have the name."""
        self._file.close()

"""Log files of engines, workers and runs are kept from growing for ever.

The processes write at the end of files that they hold open (`O_APPEND`), so a file that is too large is copied and then
emptied, as logrotate's `copytruncate` does; what is written between the two is lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path

LOOK_SECONDS = 30.0
PATTERNS = ("logs/*.log", "runs/*/logs/*.log")
logger = logging.getLogger(__name__)


class LogRotation:
    """Keeps each log file of a service's folder, and the one before it, under a size.

    Args:
        folder: of the service.
        limit: bytes of one file.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    async def run(self) -> None:
        """Go on for ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await asyncio.to_thread(self.rotate)
            except OSError as error:
                logger.warning("log files cannot be rotated, which is tried again: %s", error)

    def rotate(self) -> list[Path]:
        """Begin files that are too large anew; returns them."""
        done = []
        for pattern in PATTERNS:
            for path in self.folder.glob(pattern):
                if path.is_file() and not path.is_symlink() and path.stat().st_size > self.limit:
                    self._begin_anew(path)
                    done.append(path)
        return done

    def _begin_anew(self, path: Path) -> None:
        """Keep the end of a file beside it, and empty it."""
        kept = path.with_name(f"{path.name}.1")
        temporary = path.with_name(f".{path.name}.rotating")
        with path.open("rb") as old, temporary.open("wb") as new:
            old.seek(max(0, path.stat().st_size - self.limit))
            shutil.copyfileobj(old, new)
        os.replace(temporary, kept)
        os.truncate(path, 0)

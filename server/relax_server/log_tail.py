"""The end of a log, for errors: only that is read, however long the log is, and never in an event loop."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

LINES = 15
BYTES = 16 << 10
"""How much of the end of a file is read; a line that begins before is cut."""


async def log_tail(path: Path, lines: int = LINES) -> str:
    """The last lines of a log, those that are there; empty where there is none.

    Args:
        path: of the log, which may lie on a slow disk and is read in a thread; others may be writing to it.
        lines: at most.
    """
    return await asyncio.to_thread(_read, path, lines)


def _read(path: Path, lines: int) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - BYTES))
            text = file.read(BYTES).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])

"""The end of a log, for errors: only that is read, however long the log is."""

from __future__ import annotations

import os
from pathlib import Path

LINES = 15
BYTES = 16 << 10
"""How much of the end of a file is read; a line that begins before is cut."""


def log_tail(path: Path, lines: int = LINES) -> str:
    """The last lines of a log, those that are there; empty where there is none.

    Args:
        path: of the log; others may be writing to it.
        lines: at most.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - BYTES))
            text = file.read(BYTES).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])

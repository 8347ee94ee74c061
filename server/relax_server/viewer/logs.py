"""Logs of a run's roles: which there are, and the end of one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from relax_server.gateway.errors import unknown
from relax_server.viewer.base import ViewedRun

BYTES = 64 << 10
"""Bytes of the end of a log, if nothing else is said."""
MOST_BYTES = 4 << 20


def logs_page(run: ViewedRun) -> dict[str, Any]:
    """All logs of a run by name."""
    found = []
    for name, path in sorted(_logs(run).items()):
        try:
            status = path.stat()
        except OSError:
            continue
        found.append({"name": name, "size": status.st_size, "updated": status.st_mtime})
    return {"logs": found}


def log_page(run: ViewedRun, name: str, size: int) -> dict[str, Any]:
    """The end of a log, from the beginning of a line on.

    Args:
        run: whose.
        name: as `logs_page` tells it; looked up, and never made a path of.
        size: bytes at most.

    Raises:
        ApiError: there is no such log.
    """
    path = _logs(run).get(name)
    if path is None:
        raise unknown("log", name)
    with path.open("rb") as file:
        whole = file.seek(0, os.SEEK_END)
        start = max(0, whole - min(size, MOST_BYTES))
        file.seek(start)
        text = file.read(whole - start)
    if start:
        text = text[text.find(b"\n") + 1 :]
    return {"name": name, "size": whole, "text": text.decode(errors="replace")}


def _logs(run: ViewedRun) -> dict[str, Path]:
    """Log files by name; none for who may not see where things lie, of which logs are full."""
    if run.folder is None or not run.shows_paths:
        return {}
    try:
        found = list((run.folder / "logs").iterdir())
    except OSError:
        return {}
    return {path.name: path for path in found if path.is_file() and not path.is_symlink()}

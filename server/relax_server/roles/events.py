"""What a run says, kept in its folder: one JSON object a line, in the order in which it was said."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

EventKind = Literal[
    "started",
    "stage",
    "finding",
    "warning",
    "restart",
    "evaluation",
    "checkpoint",
    "alarm",
    "stopped",
    "failed",
    "ended",
]
Level = Literal["ok", "note", "problem"]
LEVELS: dict[EventKind, Level] = {
    "warning": "note",
    "restart": "note",
    "stopped": "note",
    "alarm": "problem",
    "failed": "problem",
}
"""Levels of the kinds that are not `ok`; a finding brings its own."""
TAIL = 1 << 20
"""Bytes at the end of a file in which its last whole line is looked for."""


@dataclass(frozen=True)
class RunEvent:
    """One thing that a run said."""

    kind: EventKind
    what: str
    step: int
    """Optimizer steps that were done then."""
    level: Level = "ok"
    advice: str = ""
    """What to do about it; empty: nothing, or `what` says it."""
    role: str = ""
    """The role that it is about, such as `policy` or `engine-e1`; empty: the run."""


class EventLog:
    """Appends events to a file; a line is whole or absent, also after a crash or on a full disk.

    Args:
        path: of the file. One that is there is gone on with; a line that a crash has cut is dropped.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._size, self._n = _last_whole_line(self._fd)
        os.ftruncate(self._fd, self._size)

    def add(self, event: RunEvent) -> None:
        """Write an event with its number, from 1 on, and the time.

        Raises:
            OSError: it cannot be written, as on a full disk; the file is as it was.
        """
        row: dict[str, Any] = {"n": self._n + 1, "time": time.time()} | asdict(event)
        line = (json.dumps(row) + "\n").encode()
        try:
            written = os.pwrite(self._fd, line, self._size)
            while written < len(line):
                written += os.pwrite(self._fd, line[written:], self._size + written)
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size, self._n = self._size + len(line), self._n + 1

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Events of a run, oldest first: `n`, `time` (Unix seconds) and the fields of `RunEvent`; none where there is no file."""
    if path.exists():
        with path.open() as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)


def _last_whole_line(fd: int) -> tuple[int, int]:
    """Bytes up to the end of the last whole line, and its number; (0, 0): there is none."""
    size = os.fstat(fd).st_size
    begin = max(size - TAIL, 0)
    whole, newline, _ = os.pread(fd, size - begin, begin).rpartition(b"\n")
    if not newline:
        return 0, 0
    return begin + len(whole) + 1, json.loads(whole.rpartition(b"\n")[2])["n"]

"""A file of JSON lines that grows, read from where the reader was; a reader notices when the file was written anew."""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

MARK_BYTES = 64
"""Bytes before a place that say whether the file is still the same up to there."""
START = "0-0-0"
"""The cursor of the beginning."""


@dataclass(frozen=True)
class Lines:
    """What a read found."""

    rows: list[dict[str, Any]]
    next: str
    """The cursor behind them."""
    reset: bool
    """The file is not the one of the given cursor: these are all its rows."""


def read_lines(path: Path, after: str | None = None) -> Lines:
    """The whole lines behind a cursor; a line that is still being written comes next time, one that is no JSON never.

    Args:
        path: of the file; one that is not there has no lines.
        after: a cursor; None, or one that no longer fits: all lines are read.
    """
    try:
        with path.open("rb") as file:
            offset = _place(file, after)
            file.seek(offset or 0)
            text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            end = _cursor(file, path, (offset or 0) + len(text))
    except OSError:
        return Lines([], START, after not in (None, START))
    rows = []
    for line in text.splitlines():
        with contextlib.suppress(orjson.JSONDecodeError):
            row = orjson.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return Lines(rows, end, after is not None and offset is None)


def end_of(path: Path) -> str:
    """The cursor behind the last whole line, as `read_lines` would give it."""
    try:
        with path.open("rb") as file:
            size = at = file.seek(0, 2)
            while at > 0:
                start = max(0, at - (64 << 10))
                file.seek(start)
                found = file.read(at - start).rfind(b"\n")
                if found >= 0:
                    return _cursor(file, path, start + found + 1)
                at = start
            return _cursor(file, path, 0) if size == 0 or at == 0 else START
    except OSError:
        return START


def _cursor(file: IO[bytes], path: Path, offset: int) -> str:
    return f"{path.stat().st_ino:x}-{offset:x}-{_mark(file, offset):x}"


def _mark(file: IO[bytes], offset: int) -> int:
    start = max(0, offset - MARK_BYTES)
    file.seek(start)
    return zlib.crc32(file.read(offset - start))


def _place(file: IO[bytes], after: str | None) -> int | None:
    """The offset that a cursor stands for; None: it is of another file."""
    if after is None or not re.fullmatch("[0-9a-f]{1,16}-[0-9a-f]{1,15}-[0-9a-f]{1,8}", after):
        return None
    inode, offset, mark = (int(part, 16) for part in after.split("-"))
    if after == START:
        return 0
    status = os.fstat(file.fileno())
    if status.st_ino != inode or status.st_size < offset or _mark(file, offset) != mark:
        return None
    return offset

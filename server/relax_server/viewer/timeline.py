"""What every process of a run did when, within a window of time, as few enough spans to draw."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

MOST_SPANS = 4000
"""Spans of a lane; more are merged with their neighbours."""
MOST_LANES = 16
"""Lanes of a process, which overlapping work is spread over; spans of further ones are left out, and counted."""
MOST_BYTES = 16 << 20
"""Bytes of a process's file that are read for an answer."""

Span = tuple[float, float, str]
"""Start (Unix seconds), duration (seconds), name."""


@dataclass(frozen=True)
class Window:
    """A stretch of time, Unix seconds."""

    start: float = -math.inf
    end: float = math.inf

    def holds(self, span: Span) -> bool:
        """Whether a part of the span is in it."""
        return span[0] <= self.end and span[0] + span[1] >= self.start


def timeline_page(folder: Path | None, window: Window) -> dict[str, Any]:
    """The spans of all processes, a lane each, or several where their work overlaps.

    Args:
        folder: of the run.
        window: without ends it is all, of long runs the last part.
    """
    lanes: dict[str, list[Span]] = {}
    hidden = 0
    for file in sorted((folder / "timeline").glob("*.jsonl")) if folder is not None else ():
        for lane, span in _spans(file, window):
            if lane >= MOST_LANES:
                hidden += 1
                continue
            lanes.setdefault(file.stem if not lane else f"{file.stem}/{lane}", []).append(span)
    every = [span for spans in lanes.values() for span in spans]
    start = window.start if math.isfinite(window.start) else min((s[0] for s in every), default=0.0)
    end = window.end if math.isfinite(window.end) else max((s[0] + s[1] for s in every), default=0.0)
    drawn = [{"name": name, "spans": merged(sorted(spans), (end - start) / MOST_SPANS)} for name, spans in lanes.items()]
    return {"from": start, "to": end, "lanes": sorted(drawn, key=lambda lane: _order(lane["name"])), "hidden": hidden}


def merged(spans: list[Span], gap: float) -> list[Span]:
    """At most `MOST_SPANS` spans: neighbours of a name that are close become one, then neighbours of any names.

    Args:
        spans: of one lane, by start.
        gap: seconds between two that count as close; doubled until few enough are left.
    """
    names = True
    while len(spans) > MOST_SPANS:
        out = [spans[0]]
        for start, duration, name in spans[1:]:
            before, length, last = out[-1]
            if start - (before + length) <= gap and (name == last or not names):
                kept = last if length >= duration else name
                out[-1] = before, max(before + length, start + duration) - before, kept
            else:
                out.append((start, duration, name))
        if len(out) > MOST_SPANS:
            names, gap = False, gap * 2 or 1e-6
        spans = out
    return spans


def _spans(path: Path, window: Window) -> Iterator[tuple[int, Span]]:
    """Lane and span of each line in the window; lines that a killed process left unfinished are passed over."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        size = file.seek(0, 2)
        start = 0
        if size > MOST_BYTES:
            start = _first(file, size, window.start) if math.isfinite(window.start) else size - MOST_BYTES
        file.seek(start)
        if start:
            file.readline()
        for line in file.read(MOST_BYTES).splitlines():
            found = _parsed(line)
            if found is not None and window.holds(found[1]):
                yield found


def _first(file: IO[bytes], size: int, begin: float) -> int:
    """An offset before the first line that ends after a time; a process writes each span when it ends."""
    low, high = 0, size
    while high - low > 64 << 10:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()
        found = _parsed(file.readline())
        if found is not None and found[1][0] + found[1][1] < begin:
            low = middle
        else:
            high = middle
    return low


def _parsed(line: bytes) -> tuple[int, Span] | None:
    with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError):
        event = orjson.loads(line)
        return int(event.get("tid", 0)), (event["ts"] / 1e6, event["dur"] / 1e6, str(event["name"]))
    return None


def _order(name: str) -> tuple[str, int]:
    process, _, lane = name.partition("/")
    return process, int(lane or 0)

"""What every process of a run did when, in Chrome trace format (chrome://tracing, ui.perfetto.dev).

Each process appends spans to a file of its own, one JSON object a line, so that nothing is lost when one is killed;
`write_trace` puts them together.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_sdk.spans import read_spans

TRACE = "timeline.json"

logger = logging.getLogger(__name__)


class Timeline:
    """The spans of one process; times are `time.time()`, which all processes of a machine share.

    Args:
        folder: gets `<role>-<pid>.jsonl`; None records nothing.
        role: names the process in the trace.
    """

    def __init__(self, folder: Path | None, role: str) -> None:
        self._file = None
        self._busy: set[int] = set()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"{role}-{os.getpid()}.jsonl").open("a", buffering=1)

    def add(self, name: str, began: float, ended: float, lane: int = 0, **args: Any) -> None:
        """Record a span.

        Args:
            name: what was done.
            began: seconds since the epoch.
            ended: seconds since the epoch.
            lane: spans of one lane do not overlap; lanes are drawn below each other.
            args: shown when the span is clicked.
        """
        if self._file is None:
            return
        event = {"name": name, "ph": "X", "ts": round(began * 1e6), "dur": round((ended - began) * 1e6), "tid": lane}
        try:
            self._file.write(json.dumps(event | {"args": args}) + "\n")
        except OSError as error:  # what is only to be looked at must not end the work
            logger.warning("the timeline ends here: %s", error)
            self._file = None

    @contextlib.contextmanager
    def span(self, name: str, lane: int = 0, **args: Any) -> Iterator[None]:
        """Record a block."""
        began = time.time()
        try:
            yield
        finally:
            self.add(name, began, time.time(), lane, **args)

    @contextlib.contextmanager
    def overlapping(self, name: str, first_lane: int = 1, **args: Any) -> Iterator[None]:
        """Record a block that may overlap others of its kind, in the first lane that is free."""
        lane = next(n for n in range(first_lane, first_lane + len(self._busy) + 1) if n not in self._busy)
        self._busy.add(lane)
        try:
            with self.span(name, lane, **args):
                yield
        finally:
            self._busy.discard(lane)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Bursts:
    """Many short activities as few spans: those less than `gap` seconds apart are one, of at most `longest` seconds.

    Args:
        timeline: where they go.
        name: of the spans.
        gap: seconds.
        longest: seconds.
    """

    def __init__(self, timeline: Timeline, name: str, gap: float = 0.005, longest: float = 1.0) -> None:
        self._timeline, self._name, self._gap, self._longest = timeline, name, gap, longest
        self._began = self._ended = 0.0
        self._sums: dict[str, int] = {}

    def add(self, began: float, ended: float, **counts: int) -> None:
        """One activity; its counts are summed over the span."""
        if self._sums and (began - self._ended > self._gap or ended - self._began > self._longest):
            self.flush()
        if not self._sums:
            self._began = began
        self._ended = ended
        for key, value in ({"n": 1} | counts).items():
            self._sums[key] = self._sums.get(key, 0) + value

    def flush(self) -> None:
        """Record what is open."""
        if self._sums:
            self._timeline.add(self._name, self._began, self._ended, **self._sums)
            self._sums = {}


def write_trace(folder: Path, out: Path) -> None:
    """One file of all processes' spans, with time 0 at the first."""
    spans = read_spans(folder)
    start = min((events[0]["ts"] for events in spans.values() if events), default=0)
    events: list[dict[str, Any]] = []
    for name, own in spans.items():
        role, _, number = name.rpartition("-")
        pid = int(number)
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": role}})
        events += [event | {"pid": pid, "ts": event["ts"] - start} for event in own]
    temporary = out.with_suffix(".partial")
    temporary.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    temporary.replace(out)

"""What is told to the trackers of a run: each in a thread of its own, so that none can slow the run or end it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from relax_sdk.errors import raised
from relax_sdk.showing import MEDIA
from relax_server.trackers.base import End, TrackedRun, Tracker, flatten
from relax_server.trackers.samples import sample_answers

QUEUE = 1024
"""Calls that may wait for a tracker; what comes then is dropped and counted."""
CLOSE_SECONDS = 30.0
"""For a tracker to show what waits and to close; then it is left behind."""
KEPT = 512
"""Steps whose figures are remembered, so that what comes again of one is told once."""

Call = Callable[[Tracker], None]


class Delivery:
    """One tracker, and the thread that calls it.

    Args:
        name: of the tracker, for warnings.
        tracker: called from the thread only.
        size: calls that may wait.
    """

    def __init__(self, name: str, tracker: Tracker, size: int = QUEUE) -> None:
        self.name, self._tracker = name, tracker
        self._calls: queue.Queue[Call | End] = queue.Queue(size)
        self._failed = False
        self._news: deque[str] = deque()
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, call: Call) -> None:
        """Call the tracker when its turn comes; returns at once."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            if not self._dropped and not self._failed:
                self._news.append(
                    f"is too slow: {self._calls.maxsize} calls wait for it, and what comes now is not shown there"
                )
            self._dropped += 1

    def news(self) -> str | None:
        """What is to be said of it, once: that it failed, or that it is too slow."""
        return f"tracker {self.name} {self._news.popleft()}" if self._news else None

    def end(self, end: End) -> None:
        """Nothing comes after this."""
        while True:
            try:
                return self._calls.put_nowait(end)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._calls.get_nowait()
                    self._dropped += 1

    def wait(self, seconds: float) -> str | None:
        """Wait until it has closed; what is to be said if it has not, or failed on the way."""
        self._thread.join(max(seconds, 0.0))
        if self._thread.is_alive():
            waits = self._calls.qsize()
            return f"tracker {self.name} did not end within {CLOSE_SECONDS:.0f} s and is left behind; {waits} calls wait for it"
        return self.news()

    def _work(self) -> None:
        while callable(call := self._calls.get()):
            if not self._failed:
                self._try(call)
        end = call
        self._try(lambda tracker: tracker.close(end))

    def _try(self, call: Call) -> None:
        try:
            call(self._tracker)
        except BaseException as error:  # a library may raise SystemExit; that, too, ends no more than the tracker
            if not self._failed:
                self._news.append(f"{raised(error)}; the run goes on without it")
            self._failed = True


class Trackers:
    """All trackers of a run.

    Args:
        trackers: by name.
        run: what they show.
        warn: told once of each that fails or is too slow; called from the thread that calls the methods here.
    """

    def __init__(self, trackers: Mapping[str, Tracker], run: TrackedRun, warn: Callable[[str], None]) -> None:
        self._trackers, self._run, self._warn = trackers, run, warn
        self._deliveries: list[Delivery] = []
        self._shown: dict[int, dict[str, float]] = {}

    def begin(self) -> None:
        """The run begins, or goes on; what is told before is not shown."""
        run = self._run
        self._deliveries = [Delivery(name, tracker) for name, tracker in self._trackers.items()]
        self._tell(lambda tracker: tracker.begin(run))

    def row(self, row: Mapping[str, Any]) -> None:
        """One step's metrics, as in `metrics.jsonl`; they may come again with more in them."""
        step = int(row["step"])
        shown = self._shown.pop(step, None)
        figures = {tag: value for tag, value in flatten(row) if math.isfinite(value)}
        self._shown[step] = figures
        while len(self._shown) > KEPT:
            del self._shown[next(iter(self._shown))]
        new = figures if shown is None else {tag: value for tag, value in figures.items() if shown.get(tag) != value}
        self._tell(lambda tracker: tracker.figures(step, new))
        if shown is None and row.get("samples"):
            samples = sample_answers(row["samples"], self._run.folder / MEDIA)
            self._tell(lambda tracker: tracker.samples(step, samples))

    def warning(self, step: int, text: str) -> None:
        """Something that the run says to its user, after a step."""
        self._tell(lambda tracker: tracker.warning(step, text))

    async def close(self, end: End) -> None:
        """The run has ended; waits for what is still to be shown, `CLOSE_SECONDS` at most for all together."""
        until = time.monotonic() + CLOSE_SECONDS
        deliveries, self._deliveries = self._deliveries, []
        for delivery in deliveries:
            delivery.end(end)
        for delivery in deliveries:
            self._say(await asyncio.to_thread(delivery.wait, until - time.monotonic()))

    def _tell(self, call: Call) -> None:
        for delivery in self._deliveries:
            delivery.put(call)
            self._say(delivery.news())

    def _say(self, text: str | None) -> None:
        if text is not None:
            self._warn(text)

"""Watches how long the event loop is held by one thing, so that whatever makes everybody wait is seen, and named."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
from types import FrameType

from prometheus_client import CollectorRegistry, Histogram

from relax_server.api.logs import FIELDS

logger = logging.getLogger(__name__)

BEAT = 0.02
"""Seconds between two looks at the clock."""
LONG = 0.05
"""Seconds that the loop may be held; longer is logged."""
QUIET = 5.0
"""Seconds after a line in which others are only counted."""
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
OURS = "relax_server"


class LoopWatch:
    """Measures the delays of an event loop, by a timer in it, and sees what holds it, by a thread beside it.

    `relax_loop_lag_seconds` has how much later than asked for each look came: what every request waits at such a moment.
    `relax_loop_held_seconds` has how much of that the loop's thread was computing; the rest it waited for a core, a lock or a
    disk.

    Args:
        registry: of the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        lag, held = "Delay of the event loop.", "Computing of the event loop's thread in such a delay."
        self._lag = Histogram("relax_loop_lag_seconds", lag, buckets=BUCKETS, registry=registry)
        self._held = Histogram("relax_loop_held_seconds", held, buckets=BUCKETS, registry=registry)
        self.longest_lag = self.longest_held = 0.0
        """Seconds, since it was started."""
        self._culprit = ""
        """What was seen to hold the loop since the last beat."""
        self._told, self._untold = 0.0, 0
        self._timer: asyncio.TimerHandle | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        """Watch the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._due, self._cpu = time.monotonic(), time.thread_time()
        self._again()
        threading.Thread(target=self._look, name="loop-watch", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()

    def _again(self) -> None:
        self._due = time.monotonic() + BEAT
        self._timer = self._loop.call_later(BEAT, self._beat)

    def _beat(self) -> None:
        lag, cpu = max(0.0, time.monotonic() - self._due), time.thread_time()
        held, self._cpu = min(lag, cpu - self._cpu), cpu
        self._lag.observe(lag)
        self._held.observe(held)
        self.longest_lag, self.longest_held = max(self.longest_lag, lag), max(self.longest_held, held)
        culprit, self._culprit = self._culprit, ""
        if lag > LONG:
            self._tell(lag, held, culprit)
        self._again()

    def _tell(self, lag: float, held: float, culprit: str) -> None:
        now = time.monotonic()
        if now - self._told < QUIET:
            self._untold += 1
            return
        more, self._told, self._untold = self._untold, now, 0
        fields = {"lag_ms": round(1e3 * lag), "held_ms": round(1e3 * held), "unlogged": more}
        logger.warning("the event loop was held, by %s", culprit or "many small things", extra={FIELDS: fields})

    # ------------------------------------------------------------------------------------------------ in a thread

    def _look(self) -> None:
        """Note what the loop does while a beat is late."""
        while not self._ended.wait(LONG):
            if self._culprit or time.monotonic() - self._due < LONG / 2:
                continue
            frame = sys._current_frames().get(self._thread)
            if frame is not None:
                with contextlib.suppress(Exception):  # the loop goes on meanwhile
                    self._culprit = _described(frame)


def _described(frame: FrameType) -> str:
    """`POST /v1/… at relax_server.models.processor:186 (_encode)`: the request of a stack, and the innermost line of ours."""
    place, request = "", ""
    inner: FrameType | None = frame
    while inner is not None:
        module = inner.f_globals.get("__name__", "")
        if not place and module.startswith(OURS):
            place = f"{module}:{inner.f_lineno} ({inner.f_code.co_name})"
        if "scope" in inner.f_code.co_varnames:
            scope = inner.f_locals.get("scope")
            if isinstance(scope, dict) and "path" in scope:
                request = f"{scope.get('method', 'WEBSOCKET')} {scope['path']} at "
        inner = inner.f_back
    return request + (place or f"{frame.f_globals.get('__name__')}:{frame.f_lineno} ({frame.f_code.co_name})")

"""What has changed in a run that goes on: few words, twice a second at most, upon which the page asks for what is new."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from threading import Lock
from typing import Any

from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.responses import Response

from relax_sdk.errors import JournalError, RelaxError
from relax_sdk.run import CONFIG, METRICS
from relax_server.journal.finding import TrajectoryQuery
from relax_server.json_form import json_text
from relax_server.viewer.base import ViewedRun
from relax_server.viewer.folders import read_json
from relax_server.viewer.json_lines import START, end_of
from relax_server.viewer.metrics import EVENTS
from relax_server.viewer.summary import Summaries, status_of

LOOK_SECONDS = 0.5
"""Seconds between two looks at a run, however many follow it."""
CHECK_SECONDS = 15.0
"""Seconds after which it is asked again whether a follower may still look; comments are sent as often."""
LOOK_LIMIT = 30.0
"""Seconds that a look may take."""
MOST = 64
"""Runs whose last look is remembered."""


class Changes:
    """Looks at runs; all that follow a run share a look. Safe to use from several threads."""

    def __init__(self, summaries: Summaries) -> None:
        self._summaries = summaries
        self._last: OrderedDict[tuple[str, str, bool], tuple[float, dict[str, Any]]] = OrderedDict()
        self._lock = Lock()

    def of(self, run: ViewedRun) -> dict[str, Any]:
        """Where metrics, events and trajectories of a run end, its status and its state."""
        key = str(run.folder), run.run, run.shows_paths
        with self._lock:
            at, known = self._last.get(key, (0.0, {}))
            if time.monotonic() - at < LOOK_SECONDS / 2:
                return known
        found = self._look(run)
        with self._lock:
            self._last[key] = time.monotonic(), found
            self._last.move_to_end(key)
            while len(self._last) > MOST:
                self._last.popitem(last=False)
        return found

    def _look(self, run: ViewedRun) -> dict[str, Any]:
        folder = run.folder
        try:
            journal = run.open_journal()
            newest = journal.find(run.run, TrajectoryQuery(limit=1)) if journal is not None else []
        except JournalError:  # told where trajectories are asked for
            newest = []
        return {
            "metrics": end_of(folder / METRICS) if folder is not None else START,
            "events": end_of(folder / EVENTS) if folder is not None else START,
            "seq": newest[0].seq if newest else 0,
            "status": status_of(run),
            "state": self._summaries.state(run, read_json(folder / CONFIG) if folder is not None else None),
        }


def follow(
    look: Callable[[], Awaitable[dict[str, Any]]], still: Callable[[], Awaitable[Any]], count: Callable[[int], None]
) -> Response:
    """Server-sent events: `changed` at once and after each change, `over` when the caller may not look any more.

    Args:
        look: at the run.
        still: raises `RelaxError` when the caller may not look.
        count: told 1 when somebody begins to follow, and -1 at the end.
    """

    async def events() -> AsyncIterator[ServerSentEvent]:
        count(1)
        try:
            async for event in changes():
                yield event
        finally:
            count(-1)

    async def changes() -> AsyncIterator[ServerSentEvent]:
        last: dict[str, Any] | None = None
        checked = time.monotonic()
        while True:
            try:
                if time.monotonic() - checked > CHECK_SECONDS:
                    await still()
                    checked = time.monotonic()
                found = await asyncio.wait_for(look(), LOOK_LIMIT)
            except RelaxError as error:
                yield ServerSentEvent(json_text({"error": {"message": str(error)}}), event="over")
                return
            except TimeoutError:  # of a slow disk; the next look may be faster
                found = last
            if found is not None and found != last:
                last = found
                yield ServerSentEvent(json_text(found), event="changed")
            await asyncio.sleep(LOOK_SECONDS)

    return EventSourceResponse(events(), ping=round(CHECK_SECONDS), headers={"Cache-Control": "no-store"})

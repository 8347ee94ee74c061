"""How often a caller may be refused before its requests are slowed down."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from relax_server.gateway.errors import ApiError

BURST_SECONDS = 4.0
"""Seconds' worth of refusals that a caller may have at once."""
MOST_WAITING = 256
"""Requests of one caller that are held back at once; more are refused as they come."""
CALLERS = 4096
"""Callers that are remembered: those that were refused last."""


@dataclass
class _Caller:
    left: float
    """Refusals that it may still have; negative: it was refused too often."""
    at: float
    """When that was reckoned."""
    next: float = 0.0
    """When the next of its requests may go on."""
    waiting: int = 0
    """Requests that are held back."""


class Refusals:
    """Refusals of each caller, as a bucket that empties steadily. Belongs to one event loop.

    A caller that has had too many is not refused for it: its requests go on one after the other, as many a second as it may
    have refusals, until it has had fewer. What is never refused is never slowed down.

    Args:
        each_second: refusals that a caller may have.
        clock: seconds, never going back.
    """

    def __init__(self, each_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.each_second, self._clock = each_second, clock
        self._callers: OrderedDict[str, _Caller] = OrderedDict()
        self.slow: set[str] = set()
        """Callers that are slowed down."""
        self.slowed = self.turned_away = 0
        """Requests that were held back, and those that were refused because too many were."""

    def note(self, caller: str) -> None:
        """A request of a caller was refused."""
        now, burst = self._clock(), BURST_SECONDS * self.each_second
        known = self._callers.get(caller)
        if known is None:
            known = self._callers[caller] = _Caller(burst, now)
            if len(self._callers) > CALLERS:
                self._forget()
        self._callers.move_to_end(caller)
        self._fill(known, now)
        known.left = max(known.left - 1, -self.each_second)
        if known.left <= 0:
            self.slow.add(caller)

    async def turn(self, caller: str) -> None:
        """Wait until a request of a caller may go on: at once, unless it is `slow`.

        Raises:
            ApiError: 429, too many of its requests wait already.
        """
        if caller not in self.slow:
            return
        known, now = self._callers[caller], self._clock()
        self._fill(known, now)
        if known.left > 0 and not known.waiting:
            self.slow.discard(caller)
            return
        if known.waiting >= MOST_WAITING:
            self.turned_away += 1
            seconds = MOST_WAITING / self.each_second
            message = f"too many requests that are refused: {self.each_second:g} a second are answered; wait {seconds:.0f} s"
            raise ApiError(429, message, "too_many_refusals", headers={"Retry-After": f"{max(1.0, seconds):.0f}"})
        known.next = max(now, known.next) + 1 / self.each_second
        known.waiting += 1
        self.slowed += 1
        try:
            await asyncio.sleep(known.next - now)
        finally:
            known.waiting -= 1

    def readings(self) -> list[tuple[str, str, str, dict[str, float]]]:
        """What was held back, for metrics."""
        return [
            ("relax_requests_slowed", "Requests held back, as their callers are refused often.", "", {"": float(self.slowed)}),
            ("relax_requests_turned_away", "Requests of such callers beyond those.", "", {"": float(self.turned_away)}),
        ]

    def _fill(self, known: _Caller, now: float) -> None:
        known.left = min(BURST_SECONDS * self.each_second, known.left + (now - known.at) * self.each_second)
        known.at = now

    def _forget(self) -> None:
        """Forget the caller whose last refusal is the longest ago, of those that wait for nothing."""
        oldest = next((caller for caller, known in self._callers.items() if not known.waiting), None)
        if oldest is not None:
            del self._callers[oldest]
            self.slow.discard(oldest)

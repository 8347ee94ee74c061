"""Calls to other people's servers that are tried again: what may pass, and how long to wait."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tenacity

PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""HTTP statuses that may pass; all others are final."""
LONGEST_PAUSE = 10.0
"""Seconds between two tries, unless the server asks for more."""
LONGEST_ASKED = 60.0
"""Seconds that a server's `Retry-After` is heeded for."""


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that an answer asks to wait for; 0 if it does not."""
    value = headers.get("Retry-After", "")
    return min(LONGEST_ASKED, float(value)) if value.isdecimal() else 0.0


def retrying(
    passing: type[Exception], first_pause: float, *, attempts: int | None = None, seconds: float | None = None
) -> tenacity.AsyncRetrying:
    """A loop of tries, with exponential back-off and jitter; the last error is raised as it is.

    Args:
        passing: errors after which it is tried again; their attribute `retry_after`, if there is one, is heeded.
        first_pause: seconds before the second try, doubled before each further one, up to 10; jitter takes up to half.
        attempts: tries in all; None: no limit.
        seconds: no pause begins that would end later; None: no limit.
    """
    import tenacity

    growing = tenacity.wait_exponential(multiplier=first_pause, max=LONGEST_PAUSE)

    def pause(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        return max(growing(state) * random.uniform(0.5, 1.0), getattr(error, "retry_after", 0.0))

    stops: list[tenacity.stop.stop_base] = [tenacity.stop_after_attempt(attempts)] if attempts is not None else []
    stops += [tenacity.stop_before_delay(seconds)] if seconds is not None else []
    return tenacity.AsyncRetrying(
        stop=tenacity.stop_any(*stops), wait=pause, retry=tenacity.retry_if_exception_type(passing), reraise=True
    )

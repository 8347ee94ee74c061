"""Work that is tried again when it fails with what may pass: which errors, how many tries, and how long to wait between two."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tenacity

PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""HTTP statuses of other people's servers that may pass; all others are final."""
LONGEST_PAUSE = 10.0
"""Seconds between two tries, unless a caller sets another limit or the server asks for more."""
LONGEST_ASKED = 60.0
"""Seconds that a server's `Retry-After` is heeded for."""

Passing = type[BaseException] | Callable[[BaseException], bool]
"""Errors after which work is tried again: their class, or a function that says whether an error is one."""


def retry_after(headers: Mapping[str, str], longest: float = LONGEST_ASKED) -> float:
    """Seconds that an answer asks to wait for, `longest` at most; 0 if it does not ask."""
    value = headers.get("Retry-After", "")
    return min(longest, float(value)) if value.isdecimal() else 0.0


def growing_pauses(first: float, longest: float = LONGEST_PAUSE) -> Iterator[float]:
    """Seconds of one pause after the other, without end: `first`, then doubled up to `longest`; jitter takes up to half.

    For a loop that cannot afford `retrying`, which costs some 30 µs even where the first try succeeds, and more to import.
    """
    pause = first
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, longest)


def retrying(
    passing: Passing,
    first_pause: float,
    *,
    longest_pause: float = LONGEST_PAUSE,
    attempts: int | None = None,
    seconds: float | None = None,
) -> tenacity.AsyncRetrying:
    """Tries in asyncio, with `growing_pauses`; the last error is raised as it is, and so is one that does not pass.

    `await retrying(…)(work, *args)` returns what `work` does; it is made anew for each piece of work, whose tries it counts.

    Args:
        passing: errors after which it is tried again; their attribute `retry_after`, if there is one, is heeded.
        first_pause: seconds before the second try, doubled before each further one; jitter takes up to half.
        longest_pause: seconds that a pause grows to.
        attempts: tries in all; None: no limit.
        seconds: no pause begins that would end later; None: no limit.
    """
    import tenacity

    return tenacity.AsyncRetrying(**_rules(passing, growing_pauses(first_pause, longest_pause), attempts, seconds))


def retrying_in_thread(
    passing: Passing,
    first_pause: float,
    *,
    longest_pause: float = LONGEST_PAUSE,
    attempts: int | None = None,
    seconds: float | None = None,
) -> tenacity.Retrying:
    """`retrying` for plain code: `retrying_in_thread(…)(work, *args)` blocks its thread; the arguments are the same."""
    import tenacity

    return tenacity.Retrying(**_rules(passing, growing_pauses(first_pause, longest_pause), attempts, seconds))


def _rules(passing: Passing, pauses: Iterator[float], attempts: int | None, seconds: float | None) -> dict[str, Any]:
    import tenacity

    def pause(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        return max(next(pauses), getattr(error, "retry_after", 0.0))

    stops: list[tenacity.stop.stop_base] = [tenacity.stop_after_attempt(attempts)] if attempts is not None else []
    stops += [tenacity.stop_before_delay(seconds)] if seconds is not None else []
    again = tenacity.retry_if_exception_type(passing) if isinstance(passing, type) else tenacity.retry_if_exception(passing)
    return {"stop": tenacity.stop_any(*stops), "wait": pause, "retry": again, "reraise": True}

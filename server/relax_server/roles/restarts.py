"""How often a role may be started again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from relax_sdk.errors import RunError

MAX_RESTARTS = 5
"""Restarts of one role within `RESTART_WINDOW` seconds; one more ends the run."""

RESTART_WINDOW = 600.0


class Restarts:
    """Counts the restarts of each role.

    Args:
        how_to_resume: the command that continues the run, for the error.
        clock: seconds, never going back.
    """

    def __init__(self, how_to_resume: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._how_to_resume, self._clock = how_to_resume, clock
        self._times: dict[str, deque[float]] = {}

    def count(self, role: str, detail: str) -> None:
        """Count one restart.

        Args:
            role: which one ended.
            detail: why, for the error; the end of its log.

        Raises:
            RunError: it ended too often.
        """
        times = self._times.setdefault(role, deque())
        now = self._clock()
        while times and now - times[0] > RESTART_WINDOW:
            times.popleft()
        times.append(now)
        if len(times) > MAX_RESTARTS:
            raise RunError(
                f"the {role} ended {len(times)} times within {RESTART_WINDOW / 60:.0f} minutes; {detail}\n"
                f"go on with: {self._how_to_resume}"
            )

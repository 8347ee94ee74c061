"""How often a role may be started again."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from relax_sdk.errors import RunError

MAX_RESTARTS = 5
"""Restarts of one role within `RESTART_WINDOW` seconds; one more ends the run."""

RESTART_WINDOW = 600.0

MAX_IN_VAIN = 10
"""Restarts in a row, at any pace, of a role that gets no further than it was before; one more ends the run."""


class Restarts:
    """Counts the restarts of each role.

    Args:
        how_to_resume: the command that continues the run, for the error.
        clock: seconds, never going back.
    """

    def __init__(self, how_to_resume: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._how_to_resume, self._clock = how_to_resume, clock
        self._times: dict[str, deque[float]] = {}
        self._in_vain: dict[str, int] = {}
        """Restarts of the roles that tell of progress, since the last."""
        self._total = Counter[str]()

    def went_on(self, role: str) -> None:
        """The role has done something that it had not done before; from now on it is expected to, however long it takes."""
        self._in_vain[role] = 0

    def total(self, role: str) -> int:
        """How often a role was started again since the run's program began."""
        return self._total[role]

    def count(self, role: str, detail: str) -> None:
        """Count one restart.

        Args:
            role: which one ended.
            detail: why, for the error; the end of its log.

        Raises:
            RunError: it ended too often, or too many times in a row without progress.
        """
        times = self._times.setdefault(role, deque())
        now = self._clock()
        while times and now - times[0] > RESTART_WINDOW:
            times.popleft()
        times.append(now)
        self._total[role] += 1
        often = f"{len(times)} times within {RESTART_WINDOW / 60:.0f} minutes" if len(times) > MAX_RESTARTS else ""
        if role in self._in_vain:
            self._in_vain[role] += 1
            if not often and self._in_vain[role] > MAX_IN_VAIN:
                often = f"{self._in_vain[role]} times without getting any further"
        if often:
            raise RunError(f"the {role} ended {often}; {detail}\ngo on with: {self._how_to_resume}")

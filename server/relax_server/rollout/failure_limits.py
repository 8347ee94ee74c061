"""When so much of a run fails that it is not worth going on with: groups in a row, or too large a share of the attempts."""

from __future__ import annotations

from collections import Counter, deque

from relax_sdk.config import RolloutConfig
from relax_sdk.trajectory import Trajectory
from relax_server.rollout.group import GroupResult

FIRST_FAILURES = 8
"""Groups that fail in the same way before any was usable, and end the run, or those of a batch where it has more."""
WINDOW = 256
"""The last attempts whose share of failures is looked at, or those of two batches where these are more."""
NAMED = 3
"""Causes that are named, the commonest first."""


class FailureLimits:
    """Counts what failed in a run, in its warm-up, in an evaluation or in a rollout of a service.

    Args:
        config: the limits: `max_failed_groups`, `max_failed_share`.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self.any_usable = False
        """Some group was usable, also in an earlier start."""
        self._kinds: set[str] = set()
        """Kinds of errors that groups failed with."""
        self.in_a_row = 0
        """Groups without a usable episode since the last that had one."""
        self._last: deque[str | None] = deque(maxlen=max(WINDOW, 2 * config.groups_per_step * config.group_size))
        """Causes of the last attempts that ended; None: it was usable."""
        self._error = ""
        """The last failure in words."""

    def ended(self, result: GroupResult) -> str | None:
        """Count a group that has ended.

        Args:
            result: what became of it.

        Returns:
            Why the run is to end; None: it goes on.
        """
        self._last.extend(cause_of(trajectory) for trajectory in result.failed)
        self._last.extend([None] * sum(trajectory.failure is None for trajectory in result.trajectories))
        if result.error is not None or result.group is None:
            self._error = result.error or "no response tokens"
        if result.group is not None:
            self.in_a_row, self.any_usable = 0, True
        else:
            self.in_a_row += 1
            self._kinds.add(_kind(self._error))
            if self.in_a_row >= self._most():
                return f"{self.in_a_row} groups in a row had no usable episode{self._causes()}; the last failure: {self._error}"
        failed = sum(cause is not None for cause in self._last)
        if len(self._last) == self._last.maxlen and failed > self._config.max_failed_share * len(self._last):
            share = f"{failed / len(self._last):.0%} of the last {len(self._last)} attempts failed"
            limit = f"more than rollout.max_failed_share = {self._config.max_failed_share:g} allows"
            return f"{share}, {limit}{self._causes()}; the last failure: {self._error}"
        return None

    def _most(self) -> int:
        """Groups in a row that may fail; few where no group of the run was ever usable, and all failed in the same way."""
        if self.any_usable or len(self._kinds) > 1:
            return self._config.max_failed_groups
        return min(self._config.max_failed_groups, max(self._config.groups_per_step, FIRST_FAILURES))

    def _causes(self) -> str:
        """The commonest causes of the last attempts, with their counts."""
        causes = Counter(cause for cause in self._last if cause is not None)
        named = [f"{count} × {cause}" for cause, count in causes.most_common(NAMED)]
        rest = causes.total() - sum(count for _, count in causes.most_common(NAMED))
        return f": {', '.join([*named, f'{rest} others'] if rest else named)}" if named else ""


def cause_of(trajectory: Trajectory) -> str:
    """Why an attempt failed, without what differs by task: its error, and what was raised where."""
    error = trajectory.error or ""
    _, raised, what = error.rpartition("raised ")
    if not raised:
        return f"{trajectory.failure} ({error.rpartition(': ')[2][:100]})"
    return f"{trajectory.failure} ({what.partition(':')[0]} at {what.rpartition('(')[2].rstrip(')')})"


def _kind(error: str) -> str:
    """The exception of an error and the line that raised it: what differs by task is left out."""
    raised = error.rpartition("raised ")[2]
    return f"{raised.partition(':')[0]} {raised.rpartition('(')[2]}"

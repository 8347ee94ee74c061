"""Groups without a usable episode, and when there are so many that a run is not worth going on with."""

from __future__ import annotations

from relax_sdk.config import RolloutConfig

FIRST_FAILURES = 8
"""Groups that fail in the same way before any was usable, and end the run, or those of a batch where it has more."""


class FailedGroups:
    """Counts the groups of a run that failed.

    Args:
        config: says how many in a row may.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._kinds: set[str] = set()
        """Kinds of errors that groups failed with."""
        self.in_a_row = 0

    def usable(self) -> None:
        """A group was usable."""
        self.in_a_row = 0

    def failed(self, error: str | None, any_usable: bool) -> bool:
        """A group failed; whether it is one too many.

        Args:
            error: of its last episode; None: the model said nothing.
            any_usable: some group of the run was usable before.
        """
        self.in_a_row += 1
        self._kinds.add(_kind(error))
        return self.in_a_row >= self._most(any_usable)

    def _most(self, any_usable: bool) -> int:
        """Groups in a row that may fail; few where no group of the run was ever usable, and all failed in the same way."""
        if any_usable or len(self._kinds) > 1:
            return self._config.max_failed_groups
        return min(self._config.max_failed_groups, max(self._config.groups_per_step, FIRST_FAILURES))


def _kind(error: str | None) -> str:
    """The exception of an error and the line that raised it: what differs by task is left out."""
    raised = (error or "no response tokens").rpartition("raised ")[2]
    return f"{raised.partition(':')[0]} {raised.rpartition('(')[2]}"

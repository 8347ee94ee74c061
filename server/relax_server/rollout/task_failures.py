"""Which tasks the failed attempts of a run are of."""

from __future__ import annotations

from collections import Counter

WORST = 5
"""Tasks that are named."""
KEPT = 100_000
"""Different tasks that are told apart; those that come later are not counted."""


class TaskFailures:
    """Counts failed attempts by task.

    Args:
        tasks: rows of the split, which come again and again; None: they never do.
    """

    def __init__(self, tasks: int | None) -> None:
        self.tasks = tasks
        self._played: set[int] = set()
        self._failed: Counter[int] = Counter()

    def count(self, index: int, failures: int) -> None:
        """Count a group that has ended.

        Args:
            index: of its task; rows that come again have other indices.
            failures: attempts of its episodes that failed.
        """
        row = index if self.tasks is None else index % self.tasks
        if len(self._played) < KEPT or row in self._played:
            self._played.add(row)
            if failures:
                self._failed[row] += failures

    @property
    def played(self) -> int:
        """Different tasks that were played."""
        return len(self._played)

    @property
    def failing(self) -> int:
        """Different tasks of which an attempt failed."""
        return len(self._failed)

    @property
    def attempts(self) -> int:
        """Failed attempts of all tasks."""
        return self._failed.total()

    @property
    def worst(self) -> list[tuple[int, int]]:
        """The tasks that failed most: row and failed attempts, at most `WORST` of them."""
        return self._failed.most_common(WORST)

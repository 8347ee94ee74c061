"""Which task a session plays that names none."""

from __future__ import annotations

from collections import Counter

from relax_sdk.tasks import KeptRows
from relax_sdk.trajectory import derive_seed


class NextTasks:
    """Hands out the tasks of each split in order, to each key on its own, and from the first one again after the last."""

    def __init__(self) -> None:
        self._next: Counter[tuple[str, str, str]] = Counter()

    def pick(self, rows: KeptRows, place: tuple[str, str, str], named: int | None, seed: int | None) -> int:
        """The index of a task.

        Args:
            rows: of the split.
            place: key, environment and split.
            named: the index that was asked for; None: none.
            seed: of the caller; None: none. It decides which task of a list it is, so that a seed is one episode.
        """
        if named is not None:
            return named
        if seed is not None and rows.finite and len(rows):
            return derive_seed(seed, "task") % len(rows)
        index = self._next[place]
        self._next[place] += 1
        return index % len(rows) if rows.finite and len(rows) else index

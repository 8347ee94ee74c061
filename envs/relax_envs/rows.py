"""Task rows made on demand: any row from its number alone, the same in every process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, overload

import numpy as np

from relax_sdk.trajectory import derive_seed

TRAIN_ROWS = 1_000_000
EVAL_ROWS = 256

MakeRow = Callable[[int, np.random.Generator], dict[str, Any]]
"""`make(label, rng)` builds the row of class `label`; everything else in it is drawn from `rng`."""


class GeneratedRows(Sequence[dict[str, Any]]):
    """A sequence of task rows that holds no data: row i is generated from (name, split, i) when it is asked for.

    Labels are shuffled within blocks of `8 * classes` rows, so that each class is equally frequent in every block.
    A row that was asked for lately is kept, and all samples of a group get the same media bytes.
    """

    def __init__(self, make: MakeRow, classes: int, name: str, split: str, length: int) -> None:
        """
        Args:
            make: a function of a module (so that the rows can be pickled).
            classes: number of labels, given to `make` as 0 … classes - 1.
            name: names the random stream; two sequences of one name and split are built from the same random numbers.
            split: `train` or `eval`; their streams have nothing in common.
            length: number of rows.
        """
        self._key = (make, classes, name, split)
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(f"row {index} of {self._length}")
        return dict(_row(*self._key, int(index) % self._length))


def splits(make: MakeRow, classes: int, name: str) -> dict[str, GeneratedRows]:
    """A train split of a million rows and an eval split of 256 fixed ones."""
    return {
        "train": GeneratedRows(make, classes, name, "train", TRAIN_ROWS),
        "eval": GeneratedRows(make, classes, name, "eval", EVAL_ROWS),
    }


@lru_cache(maxsize=256)
def _row(make: MakeRow, classes: int, name: str, split: str, index: int) -> dict[str, Any]:
    block, place = divmod(index, 8 * classes)
    order = np.random.default_rng(derive_seed(name, split, "labels", block)).permutation(8 * classes)
    return make(int(order[place]) % classes, np.random.default_rng(derive_seed(name, split, "row", index)))

"""Tasks: the rows an environment plays, by split."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from relax_sdk.errors import ConfigError

Task: TypeAlias = Mapping[str, Any]
TaskSource: TypeAlias = "Sequence[Task] | Iterable[Task] | EndlessRows | Callable[[], Iterable[Task]]"
Tasks: TypeAlias = "TaskSource | Mapping[str, TaskSource] | Callable[[], Any] | None"
"""A list, a generator, a `datasets.Dataset`, a function that returns one of these, or a dict of them by split."""


EVAL = "eval"
"""The split of the held-out evaluation."""
HELD_OUT = ("validation", "test")
"""Splits that are taken for `eval` where there is none, the first of them that there is."""
KEPT_ROWS = 4096
"""Rows of a generator that `KeptRows` keeps."""


@dataclass(frozen=True)
class EndlessRows:
    """Rows without an end that can be asked for in any order.

    Args:
        make: the row of an index.
    """

    make: Callable[[int], Task]


class TaskSplit:
    """One split: row `i` for any `i`.

    A sequence is read by index and wraps around; a generator is read forward and its rows kept only as long as they can
    still be asked for.
    """

    def __init__(self, name: str, source: TaskSource) -> None:
        self.name = name
        if callable(source):
            source = source()
        self._rows: Sequence[Task] | None = None
        self._iterator: Iterator[Task] | None = None
        self._endless = source if isinstance(source, EndlessRows) else None
        if self._endless is not None:
            pass
        elif hasattr(source, "__getitem__") and hasattr(source, "__len__"):
            self._rows = source  # type: ignore[assignment]
            if len(self._rows) == 0:  # type: ignore[arg-type]
                raise ConfigError(f"tasks[{name!r}] is empty")
        elif isinstance(source, Iterable):
            self._iterator = iter(source)
        else:
            raise ConfigError(
                f"tasks[{name!r}] must be a list, a generator, a datasets.Dataset or a function, got {type(source).__name__}"
            )
        self._next = 0
        self._peeked: dict[int, Any] = {}

    def __len__(self) -> int:
        """Number of rows.

        Raises:
            ConfigError: a generator has no length.
        """
        if self._rows is None:
            raise ConfigError(f"tasks[{self.name!r}] is a generator and has no length")
        return len(self._rows)

    @property
    def finite(self) -> bool:
        return self._rows is not None

    @property
    def at_hand(self) -> bool:
        """Whether rows lie in a list, so that reading one takes no time."""
        return isinstance(self._rows, (list, tuple))

    @property
    def forward(self) -> bool:
        """Whether rows can only be read in order."""
        return self._iterator is not None

    def row(self, index: int) -> dict[str, Any]:
        """Row `index`; wraps around a sequence.

        Raises:
            ConfigError: a generator ran dry, was asked to go back, or a row is not a mapping.
        """
        if self._rows is not None:
            row = self._rows[index % len(self._rows)]
        elif self._endless is not None:
            row = self._endless.make(index)
        else:
            assert self._iterator is not None
            if index in self._peeked:
                return self._mapping(index, self._peeked.pop(index))
            if index < self._next:
                raise ConfigError(
                    f"tasks[{self.name!r}] is a generator: row {index} has gone by (now at {self._next}); give a list to replay"
                )
            row = next(itertools.islice(self._iterator, index - self._next, None), None)
            self._next = index + 1
            if row is None:
                raise ConfigError(f"tasks[{self.name!r}]: the generator ended before row {index}")
        return self._mapping(index, row)

    def peek(self, n: int) -> list[dict[str, Any]]:
        """The first rows, at most `n`, without using them up: a generator's are kept until they are asked for.

        Only before any other row was read.
        """
        if self._rows is not None:
            return [self.row(i) for i in range(min(n, len(self._rows)))]
        if self._endless is not None:
            return [self.row(i) for i in range(n)]
        assert self._iterator is not None
        head = list(itertools.islice(self._iterator, n))
        self._peeked, self._next = dict(enumerate(head)), len(head)
        return [self._mapping(i, row) for i, row in enumerate(head)]

    def _mapping(self, index: int, row: Any) -> dict[str, Any]:
        if not isinstance(row, Mapping):
            raise ConfigError(f"tasks[{self.name!r}] row {index} must be a mapping, got {type(row).__name__}")
        return dict(row)


class KeptRows:
    """The rows of a split for many who ask in any order, as far as a generator's can be kept; safe for threads."""

    def __init__(self, split: TaskSplit) -> None:
        self._split = split
        self._lock = threading.Lock()
        self._next = 0
        self._kept: OrderedDict[int, dict[str, Any]] = OrderedDict()

    @property
    def finite(self) -> bool:
        return self._split.finite

    @property
    def at_hand(self) -> bool:
        """Whether rows lie in a list, so that reading one takes no time."""
        return self._split.at_hand

    def __len__(self) -> int:
        return len(self._split)

    def row(self, index: int) -> dict[str, Any]:
        """A row.

        Raises:
            ConfigError: of a generator, and it has gone by.
        """
        if not self._split.forward:
            return self._split.row(index)
        with self._lock:
            while self._next <= index:
                self._kept[self._next] = self._split.row(self._next)
                self._next += 1
                if len(self._kept) > KEPT_ROWS:
                    self._kept.popitem(last=False)
            return self._kept[index] if index in self._kept else self._split.row(index)


def task_splits(tasks: Tasks) -> dict[str, TaskSplit]:
    """Make splits of whatever an environment was registered with.

    Without an `eval` split, `validation` or else `test` is played as `eval` too, as the datasets of Hugging Face name them;
    without any of them there is no held-out evaluation. Without tasks at all, every row is `{"index": i}`.

    Raises:
        ConfigError: no `train` split, or a source of the wrong type.
    """
    if tasks is None:
        return {"train": TaskSplit("train", EndlessRows(lambda index: {"index": index}))}
    if callable(tasks):
        tasks = tasks()
    if (isinstance(tasks, Mapping) and not hasattr(tasks, "column_names")) or _is_dataset_dict(tasks):
        splits = {str(name): TaskSplit(str(name), source) for name, source in tasks.items()}  # type: ignore[union-attr]
        if "train" not in splits:
            raise ConfigError(f"tasks by split need a 'train' split, got {sorted(splits)}")
        held_out = next((splits[name] for name in (EVAL, *HELD_OUT) if name in splits), None)
        if held_out is not None:
            splits.setdefault(EVAL, held_out)
        return splits
    return {"train": TaskSplit("train", tasks)}  # type: ignore[arg-type]


def _is_dataset_dict(tasks: Any) -> bool:
    return isinstance(tasks, Mapping) and type(tasks).__name__ in ("DatasetDict", "IterableDatasetDict")

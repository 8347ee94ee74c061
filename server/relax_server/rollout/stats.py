"""What a rollout worker shows of itself."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

WINDOW = 30
"""Seconds."""


@dataclass
class Tally:
    """Counts of what happened to episodes, for display."""

    states: Counter[str] = field(default_factory=Counter)
    """Episodes that are in a state now, or ended in it."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed attempts by the name of their error."""
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=16))
    """The last failures in words."""
    ignored_cancel: int = 0
    """Episodes that went on after they were cancelled, and were left behind."""
    unlike_groups: int = 0
    """Groups whose episodes were not all shown the same at first, though they had task and seed in common."""
    closing: int = 0
    """Environments whose `close` failed."""

    def fail(self, error: BaseException) -> None:
        """Count a failure."""
        self.failures[type(error).__name__] += 1
        self.errors.append(str(error))


class Rate:
    """Counts per second over the last `WINDOW` seconds, kept by second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds: deque[tuple[int, float]] = deque()
        self.total = 0.0

    def add(self, amount: float) -> None:
        """Count something now."""
        self.total += amount
        second = int(self._clock())
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1] = (second, self._seconds[-1][1] + amount)
        else:
            self._seconds.append((second, amount))
            self._forget(second)

    @property
    def per_second(self) -> float:
        """Mean over the window, or since the beginning if that is shorter."""
        now = self._clock()
        self._forget(int(now))
        return sum(amount for _, amount in self._seconds) / max(min(now - self._began, WINDOW), 1.0)

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - WINDOW:
            self._seconds.popleft()


@dataclass(frozen=True)
class RolloutStats:
    """A look at a worker, for display."""

    in_flight: int
    """Train groups being played or written."""
    outstanding: int
    """Train groups that will still be trained or dropped; `limit` may not be passed."""
    limit: int
    committed: int
    consumed: int
    dropped: int
    version: int
    paused: bool
    states: dict[str, int]
    """Episodes that are in a state now, or ended in it since the start."""
    episodes_per_second: float
    """Usable ones, over the last half minute."""
    tokens_per_second: float
    """Response tokens of usable episodes."""
    failures: dict[str, int]
    """Failed attempts by the name of their error."""
    failed_groups_in_a_row: int
    last_errors: list[str]
    threads_given_up: int
    """Calls of plain environment code that hung."""
    threads_stuck: int
    """Calls given up that still hang."""
    ignored_cancel: int
    """Episodes that ignored their cancellation and were left behind."""
    unlike_groups: int
    """Groups whose episodes were not all shown the same at first, though they had task and seed in common."""
    tasks: int | None
    """Rows of the train split; None: there is no end of them."""
    tasks_played: int
    """Different tasks of which groups have ended."""
    failed_attempts: int
    """Failed attempts of train groups that have ended."""
    failing_tasks_total: int
    """Different tasks that these are of."""
    failing_tasks: list[tuple[int, int]]
    """The tasks of which most attempts failed, as row and failed attempts."""
    ended: int
    """Episodes that have ended, however they did."""
    warmup: tuple[int, int]
    """Episodes of the format warm-up that have ended, and how many there will be; (0, 0): there is none, or not yet."""
    engines: list[dict[str, Any]] = field(default_factory=list)

"""`EpisodeClock`: the time of an episode that counts against no limit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class EpisodeClock:
    """Adds up the seconds that an episode waits for a thread or behind a pause."""

    def __init__(self) -> None:
        self._excluded = 0.0
        self._waiting: dict[object, Callable[[], float]] = {}

    @property
    def excluded(self) -> float:
        """Seconds waited so far; they count against no limit."""
        return self._excluded + sum(waited() for waited in self._waiting.values())

    @contextlib.contextmanager
    def waits(self, waited: Callable[[], float]) -> Iterator[None]:
        """Count a wait while it lasts and afterwards; `waited` tells its seconds so far."""
        token = object()
        self._waiting[token] = waited
        try:
            yield
        finally:
            del self._waiting[token]
            self._excluded += waited()

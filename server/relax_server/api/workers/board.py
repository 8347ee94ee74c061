"""A few numbers that all processes of a service see at once, in memory that they share."""

from __future__ import annotations

import mmap
import os

SLOTS = 256
"""Workers at most."""
UP, SESSIONS, FIELDS = 0, 1, 2
PAUSED = SLOTS * FIELDS
SIZE = 8 * (PAUSED + 1)


class Board:
    """What is known of each worker. Each number is written by one process alone, and read by all without asking.

    Args:
        file: a file in memory, as `make` gives it; None: of this process alone.
    """

    def __init__(self, file: int | None = None) -> None:
        self._memory = mmap.mmap(-1 if file is None else file, SIZE)
        self._numbers = memoryview(self._memory).cast("q")

    @staticmethod
    def make() -> int:
        """A file for a board, which the processes inherit."""
        file = os.memfd_create("board")
        os.ftruncate(file, SIZE)
        return file

    def up(self, worker: int) -> bool:
        """Whether a worker takes requests; the process that started it says so."""
        return bool(self._numbers[worker * FIELDS + UP])

    def set_up(self, worker: int, up: bool) -> None:
        """Say whether a worker takes requests."""
        self._numbers[worker * FIELDS + UP] = up
        if not up:
            self.set_sessions(worker, 0)

    def sessions(self, worker: int) -> int:
        """Sessions of a worker that are not over."""
        return self._numbers[worker * FIELDS + SESSIONS]

    def set_sessions(self, worker: int, number: int) -> None:
        """Say how many sessions of a worker are not over."""
        self._numbers[worker * FIELDS + SESSIONS] = number

    @property
    def paused(self) -> bool:
        """Whether the service is paused; worker 0 says so."""
        return bool(self._numbers[PAUSED])

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._numbers[PAUSED] = paused

"""`StopSignals`: Ctrl-C, SIGTERM and SIGHUP ask a run to stop; what cannot wait is ended by a second one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A run was stopped by a signal; what could be kept was kept.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


def exit_code(stop: Interrupted) -> int:
    """Exit code of a program that a signal has stopped, as shells count: 128 and the number of the signal."""
    return 128 + stop.number


class StopSignals:
    """While it is entered, signals are requests in place of exceptions and sudden ends.

    The first one calls `stop(False)`. A second SIGINT or SIGTERM calls `stop(True)`, a third one raises `KeyboardInterrupt`.
    A closing terminal may send SIGHUP more than once, so that it counts once. Signals that the program ignores, as under
    `nohup`, or handles in its own way stay as they are. Python hands signals to the main thread alone: entered in another
    one, this does nothing.

    Args:
        stop: asks for the end, with a checkpoint where there is something to keep, or `True` for the end at once. It is called
            in the main thread, between any two of its instructions, and must only pass the request on.
    """

    def __init__(self, stop: Callable[[bool], None]) -> None:
        self._stop = stop
        self._before: dict[int, Any] = {}
        self._seen: dict[int, int] = {}
        self.caught: int | None = None
        """The first signal that came."""

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                before = signal.getsignal(number)
                if before in (signal.SIG_DFL, signal.default_int_handler) or (number == signal.SIGINT and callable(before)):
                    self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        first, self.caught = self.caught is None, self.caught or number
        self._seen[number] = self._seen.get(number, 0) + 1
        if first:
            self._stop(False)
        elif number != signal.SIGHUP and self._seen[number] == 2:
            self._stop(True)
        elif number != signal.SIGHUP and self._seen[number] > 2:
            raise Interrupted(number)

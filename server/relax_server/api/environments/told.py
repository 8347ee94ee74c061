"""What the guard of a worker tells the service in lines on its standard output: time that was spent, and last how it ended."""

from __future__ import annotations

_SPENT = "spent "
STEP = 0.5
"""Seconds of a processor that are told together, but for the last ones."""


def spent_line(seconds: float) -> str:
    """Tells of so many more seconds of a processor."""
    return f"{_SPENT}{seconds:.3f}"


def read_line(line: str) -> float | str:
    """Seconds of a processor that were spent, or how the worker ended."""
    return float(line.removeprefix(_SPENT)) if line.startswith(_SPENT) else line

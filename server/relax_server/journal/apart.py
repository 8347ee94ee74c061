"""Rows that are written together: one that cannot be stored never fails the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from relax_sdk.errors import JournalError, UnstorableError

R = TypeVar("R")
T = TypeVar("T")


def write_apart(write: Callable[[Sequence[R]], Sequence[T]], rows: Sequence[R]) -> list[T | Exception]:
    """Write rows together; where one cannot be stored, halves of them apart, until it is alone.

    With one bad row among n that takes some 2 log2(n) transactions.

    Args:
        write: writes rows in one transaction, all or none; returns one value for each.
        rows: at least one.

    Returns:
        For each row what `write` returned, or why it was not written: any `JournalError` but `UnstorableError` is the doing of
        the database, every other error that of the row.
    """
    try:
        return list(write(rows))
    except Exception as error:
        databases = isinstance(error, JournalError) and not isinstance(error, UnstorableError)
        if databases or len(rows) == 1:
            return [error] * len(rows)
    half = len(rows) // 2
    return write_apart(write, rows[:half]) + write_apart(write, rows[half:])

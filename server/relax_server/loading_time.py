"""How long a process may take that reads or writes a model: a limit that grows with its bytes."""

from __future__ import annotations

from pathlib import Path

BYTES_PER_SECOND = 20e6
"""A disk, a network or a device that is slower is taken for one that hangs."""


def seconds_to_load(least: float, *folders: Path | None) -> float:
    """Limit for reading model folders or checkpoints.

    Args:
        least: seconds for one of no size.
        folders: what is read; None, and one that is not there, have no bytes.
    """
    files = (file for folder in folders if folder is not None and folder.is_dir() for file in folder.iterdir())
    return least + sum(file.stat().st_size for file in files if file.is_file()) / BYTES_PER_SECOND

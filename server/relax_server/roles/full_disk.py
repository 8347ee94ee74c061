"""A full disk, told from other errors: it ends a run with what to do, and nothing is lost."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

FULL = {errno.ENOSPC, errno.EDQUOT}
WORDS = ("no space left on device", "disk quota exceeded", "the disk is full", "database or disk is full")
"""What libraries say that raise errors of their own."""

LITTLE = 1 << 20
"""Bytes; with less than that left a disk is the cause of whatever could not be written."""


def full_disk(error: BaseException, folders: tuple[Path, ...]) -> str | None:
    """The message for an error that comes from a full disk; None where it comes from something else.

    Args:
        error: with what it was raised from.
        folders: where the run writes: the one with the least room is named.
    """
    seen: BaseException | None = error
    while seen is not None:
        if (isinstance(seen, OSError) and seen.errno in FULL) or any(word in str(seen).lower() for word in WORDS):
            break
        seen = seen.__cause__ or seen.__context__
    room = [(free, folder) for folder in folders if (free := _free(folder)) is not None]
    least, where = min(room, default=(None, None))
    if seen is None and (least is None or least >= LITTLE or not isinstance(error, (OSError, RuntimeError))):
        return None
    named = getattr(seen, "filename", None) or where or "a folder of the run"
    left = f", which has {least / 2**20:.1f} MiB left" if named == where and least is not None else ""
    return (
        f"the disk is full: {named}{left}, cannot be written. Make room there and resume the run; its last checkpoint and all "
        "finished groups are whole"
    )


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None

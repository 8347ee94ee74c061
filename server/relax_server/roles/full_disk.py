"""A full disk, told from other errors: it ends a run with what to do, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

from relax_server.machine_limits import LITTLE, free_bytes, full_disk_error


def full_disk(error: BaseException, folders: tuple[Path, ...]) -> str | None:
    """The message for an error that comes from a full disk; None where it comes from something else.

    Args:
        error: with what it was raised from.
        folders: where the run writes: the one with the least room is named.
    """
    seen = full_disk_error(error)
    room = [(free, folder) for folder in folders if (free := free_bytes(folder)) is not None]
    least, where = min(room, default=(None, None))
    if seen is None and (least is None or least >= LITTLE or not isinstance(error, (OSError, RuntimeError))):
        return None
    named = getattr(seen, "filename", None) or where or "a folder of the run"
    left = f", which has {least / 2**20:.1f} MiB left" if named == where and least is not None else ""
    return (
        f"the disk is full: {named}{left}, cannot be written. Make room there and resume the run; its last checkpoint and all "
        "finished groups are whole"
    )

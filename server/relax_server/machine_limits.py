"""What a machine has run out of, memory or disk, told from other errors and said with what to do."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_sdk.errors import DiskFull, OutOfMemory, RelaxError, TrainingError

FULL = {errno.ENOSPC, errno.EDQUOT}
FULL_WORDS = ("no space left on device", "disk quota exceeded", "the disk is full", "database or disk is full")
"""What libraries say that raise errors of their own."""

MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")

LITTLE = 1 << 20
"""Bytes; with less than that left a disk is the cause of whatever could not be written."""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def full_disk_error(error: BaseException) -> BaseException | None:
    """Find the error in a chain of causes that names a full disk; None where none does."""
    for seen in _chain(error):
        if (isinstance(seen, OSError) and seen.errno in FULL) or any(word in str(seen).lower() for word in FULL_WORDS):
            return seen
    return None


def memory_error(error: BaseException) -> BaseException | None:
    """Find the error in a chain of causes that says that there is no memory left, on the machine or a device; or None."""
    for seen in _chain(error):
        if isinstance(seen, MemoryError) or (isinstance(seen, OSError) and seen.errno == errno.ENOMEM):
            return seen
        if isinstance(seen, RuntimeError) and any(word in str(seen).lower() for word in MEMORY_WORDS):
            return seen  # torch.OutOfMemoryError is one, and so is what its CPU allocator raises
    return None


def free_bytes(folder: Path) -> int | None:
    """Bytes that are free where a folder is, or will be; None: that cannot be known."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def check_room(folder: Path, needed: int, what: str) -> None:
    """Refuse to begin to write what does not fit on a disk.

    Args:
        folder: where it will be; it need not exist yet.
        needed: bytes.
        what: for the message.

    Raises:
        DiskFull: fewer bytes are free than are needed.
    """
    free = free_bytes(folder)
    if free is not None and free < needed:
        raise DiskFull(
            f"{folder}: no room for {what}: it needs {needed} bytes ({needed / 1e6:.1f} MB), and {free} bytes "
            f"({free / 1e6:.1f} MB) are free; make room there, or name a folder on another disk"
        )


def refusal(error: BaseException, what: str, folder: Path, *, writes: bool = False) -> TrainingError:
    """Make the error that says why a machine could not do something.

    Args:
        error: what it ended with.
        what: for the message: "the checkpoint cannot be loaded now".
        folder: that it was about.
        writes: something was to be written: where next to nothing is free, a full disk is the reason whatever was raised.
    """
    told = f"{folder}: {what} ({type(error).__name__}: {error})"
    if memory_error(error) is not None:
        return OutOfMemory(f"{told}: out of memory; {_memory_advice(error)}")
    free = free_bytes(folder)
    if full_disk_error(error) is not None or (writes and free is not None and free < LITTLE):
        left = "" if free is None else f", {free} bytes are free"
        return DiskFull(
            f"{told}: the disk is full{left}; make room there, then resume the run: what was written before is whole"
        )
    if writes and free is not None:
        told += f"; {free / 1e6:.0f} MB are free there"
    return TrainingError(told)


def _memory_advice(error: BaseException) -> str:
    import psutil

    on_device = any(type(seen).__name__ == "OutOfMemoryError" or "CUDA" in str(seen) for seen in _chain(error))
    if on_device:
        return (
            "end other programs that use the device, or set training.dtype='bfloat16', training.recompute=True or a smaller "
            "training.token_budget; with mode='colocate' give the engine a smaller share of the device"
        )
    available = psutil.virtual_memory().available / 1e9
    return (
        f"{available:.1f} GB of the machine's memory are available: end other programs, set training.dtype='bfloat16' or "
        "algorithm.kl_coef=0 (no second copy of the weights), or train a smaller model; nothing on the disk is damaged"
    )


@contextmanager
def limits_told(what: str, folder: Path, *, writes: bool = False) -> Iterator[None]:
    """Say it by `refusal` where the machine has no memory or no disk left; other errors pass as they are.

    Raises:
        OutOfMemory, DiskFull: with advice.
    """
    try:
        yield
    except RelaxError:
        raise
    except Exception as error:
        told = refusal(error, what, folder, writes=writes and isinstance(error, OSError))
        if type(told) is TrainingError:
            raise
        raise told from error

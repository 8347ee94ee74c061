"""The folder in shared memory through which a run's processes exchange weights and media features."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REMOVE_SECONDS = 5.0
"""Seconds to remove a folder into which processes that are about to end may still write."""


def root() -> Path:
    """Shared memory, or the temporary folder where the machine has none."""
    usable = os.path.isdir("/dev/shm") and os.access("/dev/shm", os.W_OK)
    return Path("/dev/shm" if usable else tempfile.gettempdir())


def create() -> Path:
    """A folder that only this user can read; its name tells `sweep` which process it belongs to.

    Raises:
        OSError: no room.
    """
    return Path(tempfile.mkdtemp(prefix=f"relax-{os.getpid()}-", dir=root()))


def remove(folder: Path) -> None:
    """Remove it, also from under a process that is still writing: under another name first, so that writes fail.

    What is still there after `REMOVE_SECONDS` is left to the `sweep` of the next run.
    """
    gone = folder.with_name(f"{folder.name}-gone-{os.getpid()}")
    end = time.monotonic() + REMOVE_SECONDS
    while time.monotonic() < end:
        try:
            folder.rename(gone)
        except FileNotFoundError:
            pass
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(gone, ignore_errors=True)
        if not folder.exists() and not gone.exists():
            return
        time.sleep(0.05)


def guard(folder: Path) -> None:
    """Have the folder removed when this process is gone, whatever ends it, by a small process that only waits for that.

    For where a process is killed together with its children: the small one is nobody's child.
    """
    reader, _writer = os.pipe()  # the writing end stays open until we end
    command = [sys.executable, "-m", "relax_server.roles.shared_memory", str(folder), str(reader)]
    shell = ["sh", "-c", '"$@" &', "sh", *command]
    null = subprocess.DEVNULL
    try:
        subprocess.run(shell, pass_fds=[reader], stdin=null, stdout=null, stderr=null, start_new_session=True, check=True)
    finally:
        os.close(reader)


def sweep() -> None:
    """Remove what runs have left behind whose processes were all killed at once."""
    for folder in root().glob("relax-*-*"):
        pid = folder.name.split("-")[1]
        try:
            mine = folder.stat().st_uid == os.getuid()
        except OSError:
            continue
        if mine and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    os.read(int(sys.argv[2]), 1)
    remove(Path(sys.argv[1]))

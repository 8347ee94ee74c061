"""Keeps a server: `python keeper.py PARENT_PID COMMAND...` ends it, and all it started, on SIGTERM or when the parent is gone.

Of the standard library only, so that it costs little. If the keeper itself is killed, the kernel kills the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

GRACE = 1.0
"""Seconds between asking and killing; some servers would go on until their last request is answered."""

PR_SET_PDEATHSIG = 1


class Stopped(Exception):
    """SIGTERM or SIGINT came."""


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None)

    def stop(number: int, frame: Any) -> NoReturn:
        raise Stopped

    server: subprocess.Popen[bytes] | None = None
    with contextlib.suppress(Stopped):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        try:
            watched = os.pidfd_open(parent)
        except ProcessLookupError:
            sys.exit(1)
        server = subprocess.Popen(
            command, start_new_session=True, preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        )
        poll = select.poll()
        for handle in (watched, os.pidfd_open(server.pid)):
            poll.register(handle, select.POLLIN)
        poll.poll()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if server is None:
        return
    asked = server.poll() is None
    if asked:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(GRACE)
    end(server)
    sys.exit(0 if asked else server.returncode & 0xFF)


def end(server: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the server and its children. Python's resource trackers come last: they end by themselves once
    those are gone, and remove the shared memory that these have left."""
    deadline = time.monotonic() + GRACE
    while (left := members(server.pid)) and time.monotonic() < deadline:
        for process in left:
            if not tracks_resources(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        server.poll()
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


def members(group: int) -> list[int]:
    """Processes of a group that run."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(ValueError, OSError):
            if os.getpgid(int(name)) == group and Path("/proc", name, "cmdline").read_bytes():  # a zombie has none
                found.append(int(name))
    return found


def tracks_resources(process: int) -> bool:
    """Whether it is what `multiprocessing` starts to remove what its processes leave."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path("/proc", str(process), "cmdline").read_bytes()
    return False


if __name__ == "__main__":
    main()

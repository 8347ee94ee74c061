"""What the processes of a worker use together, as its guard sees it from outside."""

from __future__ import annotations

import contextlib
import os
import resource
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import psutil

FILE_BYTES, PIPE_BYTES = 1024, 1 << 16
"""Memory of the system for each file in `/tmp`, however small, and for each pipe that is full."""
EVERY = 5
"""Looks, one of which is thorough although nobody has computed."""
SOCKET, OWN_SOCKETS = "socket:", 1
"""Begins the name of an open socket in `/proc`; each worker has one, to the service, which is none of its network's."""


@dataclass
class Usage:
    """Memory in bytes, and processor seconds."""

    memory: int = 0
    cpu: float = 0.0


class Tree:
    """All processes that a process has started, and those that these have; looked for again and again.

    The system tells the children of a thread in a file, where it does not all processes of the machine are asked.

    Args:
        root: the process that is not one of them.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._known: dict[int, psutil.Process] = {}
        self._seen: dict[int, float] = {}
        self._looks = 0

    def look(self) -> list[psutil.Process]:
        """Those that are there now, parents before their children."""
        if not os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):
            return psutil.Process(self._root).children(recursive=True)
        known, self._known = self._known, {}
        waiting = deque(_children(self._root))
        while waiting:
            pid = waiting.popleft()
            with contextlib.suppress(psutil.Error):
                process = known.get(pid)
                self._known[pid] = process if process is not None and process.is_running() else psutil.Process(pid)
                waiting.extend(_children(pid))
        return list(self._known.values())

    def rests(self, processes: list[psutil.Process]) -> bool:
        """Whether they are the same as when this was asked last, and none has computed since; each `EVERY` looks it is denied.

        The system counts in hundredths of a second: what somebody does in less is found a little later.
        """
        before, self._seen = self._seen, {}
        for process in processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                self._seen[process.pid] = times.user + times.system
        self._looks = self._looks + 1 if before == self._seen else 0
        return self._looks % EVERY != 0


def _children(pid: int) -> list[int]:
    """Ids of the processes that the threads of a process have started."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def usage_of(processes: list[psutil.Process], sandboxed: bool, network: bool) -> Usage:
    """What processes use, and used that were started by them or by this one and have ended.

    Args:
        processes: all of one worker.
        sandboxed: in the sandbox; then what the system holds for them counts, too.
        network: whether they are in the machine's network, whose connections are not all theirs.
    """
    usage = Usage(cpu=spent_by_children())
    for process in processes:
        with contextlib.suppress(psutil.Error), process.oneshot():
            usage.memory += _memory(process, shared=len(processes) > 1)
            times = process.cpu_times()
            usage.cpu += times.user + times.system + times.children_user + times.children_system
    if sandboxed:
        links = _pipes_and_sockets(processes)
        usage.memory += _written(processes) + _held_by_system(links)
        if not network and sum(link.startswith(SOCKET) for link in links) > OWN_SOCKETS:
            usage.memory += _on_the_way(processes[-1].pid)
    return usage


def spent_by_children() -> float:
    """Seconds of a processor of this process's children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _memory(process: psutil.Process, shared: bool) -> int:
    """Bytes in memory; of what forked processes share, each has its part."""
    if shared:
        with contextlib.suppress(psutil.AccessDenied):
            return process.memory_full_info().pss
    return process.memory_info().rss


def _written(processes: list[psutil.Process]) -> int:
    """Bytes in memory of the files in the sandbox's `/tmp`, shared memory among them."""
    ours = os.stat("/tmp").st_dev
    for process in reversed(processes):  # bubblewrap's own outer process, the first, sees the machine's
        place = f"/proc/{process.pid}/root/tmp"
        with contextlib.suppress(OSError):
            if os.stat(place).st_dev != ours:
                room = os.statvfs(place)
                return (room.f_blocks - room.f_bfree) * room.f_frsize + (room.f_files - room.f_ffree) * FILE_BYTES
    return 0


def _pipes_and_sockets(processes: list[psutil.Process]) -> set[str]:
    """Names of the open pipes and sockets of processes, as `/proc` shows them; some other files are among them."""
    found: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder := f"/proc/{process.pid}/fd"):
                with contextlib.suppress(OSError):
                    found.add(os.readlink(f"{folder}/{name}"))
    return found


def _held_by_system(links: set[str]) -> int:
    """Bytes that the system holds at most in pipes and sockets: each counts as full, as nobody tells how full it is."""
    buffer = 2 * int(Path("/proc/sys/net/core/wmem_default").read_text())  # which the filter lets nobody enlarge
    each = {"pipe:": PIPE_BYTES, SOCKET: buffer}
    return sum(size for link in links for kind, size in each.items() if link.startswith(kind))


def _on_the_way(pid: int) -> int:
    """Bytes in the TCP connections of a process's network, whose buffers grow by themselves."""
    total = 0
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                sent, received = line.split()[4].split(":")
                total += int(sent, 16) + int(received, 16)
    return total

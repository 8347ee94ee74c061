"""Servers that benchmarks start: ready before they are used, ended whatever happens, and what they cost."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

START_LIMIT, END_LIMIT = 120.0, 15.0
"""Seconds for a start; seconds to heed SIGTERM before SIGKILL."""

Ready = Callable[[str], str | None]
"""Given what the process has written, its URL once it can be used."""


class Server:
    """A process that runs.

    Args:
        url: of its HTTP server.
        process: itself; what it started counts as well.
    """

    def __init__(self, url: str, process: psutil.Process) -> None:
        self.url, self._process = url, process

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def cpu(self) -> float:
        """Seconds of processor time until now."""
        return sum(sum(process.cpu_times()[:2]) for process in self._all)

    @property
    def rss(self) -> float:
        """Memory now, in MB of 2**20 bytes."""
        return sum(process.memory_info().rss for process in self._all) / 2**20

    @property
    def peak(self) -> float:
        """The most memory that it ever had, in MB of 2**20 bytes; of several processes the sum."""
        return sum(_peak(process) for process in self._all)

    @property
    def _all(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]


def _peak(process: psutil.Process) -> float:
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():
        return process.memory_info().rss / 2**20
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 2**10


def said(word: str) -> Ready:
    """Ready when it has written `word` and, behind it, its URL."""

    def look(log: str) -> str | None:
        behind = log.partition(word)[2]
        return behind.split()[0] if behind.strip() and behind[-1].isspace() else None

    return look


def answers(url: str, path: str) -> Ready:
    """Ready when a GET of `path` is answered with 200."""

    def look(log: str) -> str | None:
        try:
            with urllib.request.urlopen(url + path, timeout=2.0):
                return url
        except OSError:
            return None

    return look


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def module(name: str, *arguments: object) -> list[str]:
    """The command that runs a module of ours."""
    return [sys.executable, "-m", name, *map(str, arguments)]


@contextlib.contextmanager
def started(command: Sequence[str], ready: Ready, log: Path, cwd: Path | None = None, **more: str) -> Iterator[Server]:
    """A server for as long as the block lasts.

    Args:
        command: what to start.
        ready: says when it is.
        log: where its output goes.
        cwd: to start it in.
        more: environment variables.

    Raises:
        RuntimeError: it ended, or was not ready in time; the message ends with its output.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by itself it would leave the server behind
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=cwd, env=os.environ | more, start_new_session=True)
    try:
        end = time.monotonic() + START_LIMIT
        while (url := ready(log.read_text(errors="replace"))) is None:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{' '.join(command)} did not start: {log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.05)
        yield Server(url, psutil.Process(process.pid))
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a group, and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_LIMIT)

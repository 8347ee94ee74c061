"""The guard of a worker: `python -m relax_server.api.environments.sandbox FD FOLDER LIMITS`.

It starts the process that holds the foreign code, with fewer rights, and watches it and all that it starts: what uses too much,
or is left over when the service or the worker ends, is killed. The reason is told in one line on standard output.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

from relax_server.api.environments.limits import WorkerLimits

POLL = 0.2
"""Seconds between looks."""
KILL_SECONDS = 5.0
FIRST_UID, UIDS = 2_000_000, 1_000_000
"""Users that workers run as where the service is root's: each has its own, which nobody else has."""
THREADS = 512
"""Threads and processes together, by the system's own count: what a process that multiplies reaches before we look."""
GUARD_NICE, WORKER_NICE = -10, 5
"""The guard must get its turn among hundreds that spin; only root can give it the first."""
ADDRESS_SPACE = 4
"""Address space, as a multiple of the memory: reserved is not used, but what is asked for at once beyond this is refused."""

_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 8, 36, 38
_CLONE_NEWNET, _CLONE_NEWUSER = 0x4000_0000, 0x1000_0000
_CAP_DAC_READ_SEARCH = 2
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Usage:
    """What the processes of a worker use together."""

    memory: int = 0
    cpu: float = 0.0


def main() -> None:
    """Guard one worker until it ends."""
    fd, folder, limits = int(sys.argv[1]), Path(sys.argv[2]), WorkerLimits(**json.loads(sys.argv[3]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent becomes ours
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        _become_worker(fd, folder, limits, guard)
    os.close(fd)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, GUARD_NICE)
    how = ""
    try:
        how = _watch(child, limits)
    finally:
        _kill_all()
        print(how or "ended", flush=True)


# ---------------------------------------------------------------------------------------------------- the worker's side


def _become_worker(fd: int, folder: Path, limits: WorkerLimits, guard: int) -> NoReturn:
    """Give up rights, then run the environment."""
    status = 1
    try:
        os.setsid()
        for stream in (0, 1):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        os.chdir(folder)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        if not limits.network:
            _leave_network()
        _limit(limits)
        _drop_rights(folder)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # which a change of user takes back
        if os.getppid() != guard:
            os._exit(1)
        from relax_server.api.environments.child import run

        run(fd)
        status = 0
    except BaseException as error:
        print(f"the worker failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def _leave_network() -> None:
    """Move into an empty network of its own; as a normal user, together with a user namespace."""
    if _libc.unshare(_CLONE_NEWNET) != 0 and (os.geteuid() == 0 or _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0):
        print(f"warning: the network cannot be forbidden here ({os.strerror(ctypes.get_errno())})", file=sys.stderr, flush=True)


def _limit(limits: WorkerLimits) -> None:
    user = os.getuid()
    there = 0 if user == 0 else sum(_threads(p) for p in psutil.process_iter() if _uid(p) == user)
    for what, value in (
        (resource.RLIMIT_AS, ADDRESS_SPACE * limits.memory),
        (resource.RLIMIT_FSIZE, limits.files),
        (resource.RLIMIT_NPROC, there + THREADS),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))
    os.setpriority(os.PRIO_PROCESS, 0, WORKER_NICE)


def _drop_rights(folder: Path) -> None:
    """Change from root to a user of the worker's own; others have nothing to drop."""
    if os.geteuid() == 0:
        uid = FIRST_UID + os.getpid() % UIDS
        os.chown(folder, uid, uid)
        os.chmod(folder, 0o700)
        os.setgroups([])
        os.setgid(uid)
        # A Python that only root can read, such as one below /root, takes the right to read files.
        private = not all(_open_to_all(Path(path)) for path in (sys.prefix, sys.base_prefix, *sys.path) if path)
        if private:
            _libc.prctl(_PR_SET_KEEPCAPS, 1)
        os.setuid(uid)
        if private:
            _keep_capability(_CAP_DAC_READ_SEARCH)
            print("warning: only root can read this Python, so environments may read all files", file=sys.stderr, flush=True)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _open_to_all(path: Path) -> bool:
    """Whether everybody can get to a folder or file; one that is not there needs no reading."""
    try:
        path = path.resolve()
        return not path.exists() or all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents) if folder.is_dir())
    except OSError:
        return False


def _keep_capability(number: int) -> None:
    header = (ctypes.c_uint32 * 2)(0x2008_0522, 0)
    data = (ctypes.c_uint32 * 6)(1 << number, 1 << number, 0, 0, 0, 0)
    if _libc.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")


# ----------------------------------------------------------------------------------------------------- the guard's side


def _watch(child: int, limits: WorkerLimits) -> str:
    """Wait until the worker ends or must end; returns how."""
    spent, debt, last = 0.0, 0.0, time.monotonic()
    while True:
        if _service_gone():
            return "the service is gone"
        ended = _reap(child)
        if ended is not None:
            return ended
        processes = psutil.Process().children(recursive=True)
        if len(processes) > limits.processes:  # before anything that takes time for each of them
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGSTOP)  # most of them at once
            return f"had {len(processes)} processes; allowed: {limits.processes}"
        usage = _usage(processes)
        if usage.memory > limits.memory:
            return f"used {usage.memory >> 20} MiB of memory; allowed: {limits.memory >> 20}"
        now = time.monotonic()
        debt = max(0.0, debt + max(0.0, usage.cpu - spent) - limits.cpus * (now - last))
        spent, last = usage.cpu, now
        if debt > POLL:
            _signal_all(signal.SIGSTOP)
            time.sleep(min(debt / limits.cpus, 1.0))
            _signal_all(signal.SIGCONT)


def _service_gone() -> bool:
    """Waits a moment; whether standard input, which the service holds, was closed meanwhile."""
    ready, _, _ = select.select([0], [], [], POLL)
    return bool(ready) and os.read(0, 1) == b""


def _reap(child: int) -> str | None:
    """Collect what has ended; how the worker itself did, if so."""
    how = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return how
        if pid == 0:
            return how
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _usage(processes: list[psutil.Process]) -> Usage:
    usage = Usage()
    for process in processes:
        with contextlib.suppress(psutil.Error), process.oneshot():
            usage.memory += _memory(process, shared=len(processes) > 1)
            times = process.cpu_times()
            usage.cpu += times.user + times.system
    return usage


def _memory(process: psutil.Process, shared: bool) -> int:
    """Bytes in memory; of what forked processes share, each has its part."""
    if shared:
        with contextlib.suppress(psutil.AccessDenied):
            return process.memory_full_info().pss
    return process.memory_info().rss


def _signal_all(number: int) -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _kill_all() -> None:
    """Kill until nothing is left; what multiplies is stopped first."""
    end = time.monotonic() + KILL_SECONDS
    while psutil.Process().children() and time.monotonic() < end:
        _signal_all(signal.SIGSTOP)
        _signal_all(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _uid(process: psutil.Process) -> int | None:
    with contextlib.suppress(psutil.Error):
        return process.uids().real
    return None


def _threads(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return process.num_threads()
    return 0


if __name__ == "__main__":
    main()

"""The guard of a worker: `python -m relax_server.api.environments.guard FD PLAN`.

It starts the process that holds the foreign code, in the sandbox unless the plan says that it is trusted, and watches it and
all that it starts: what uses too much, or is left over when the service or the worker ends, is killed. On standard output it
tells how much time of processors they spend, and in the last line the reason. What the worker prints goes to standard error,
cleaned.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import psutil

from relax_server.api.environments import unconfined
from relax_server.api.environments.limits import WorkerLimits, WorkerPlan
from relax_server.api.environments.printed import PrintedLines
from relax_server.api.environments.sandbox import enclosed, environment
from relax_server.api.environments.syscalls import filter_pipe
from relax_server.api.environments.told import STEP, spent_line
from relax_server.api.environments.usage import Tree, spent_by_children, usage_of

POLL = 0.2
"""Seconds between looks."""
KILL_SECONDS = 5.0
PRINTED_SECONDS = 2.0
"""Seconds for the last lines that a worker has printed."""
THREADS = 512
"""Threads and processes together, by the system's own count: what a process that multiplies reaches before we look."""
GUARD_NICE, WORKER_NICE = -10, 5
"""The guard must get its turn among hundreds that spin; only root can give it the first."""
ADDRESS_SPACE = 4
"""Address space, as a multiple of the memory: reserved is not used, but what is asked for at once beyond this is refused."""
OF_BUBBLEWRAP = 2
"""Its processes: one outside the sandbox, one inside."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Guard one worker until it ends."""
    fd, plan = int(sys.argv[1]), WorkerPlan.from_json(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent becomes ours
    folder = Path(tempfile.mkdtemp(prefix="relax-env-")) if plan.trusted else None
    reading, writing = os.pipe()
    guard, child = os.getpid(), os.fork()
    if child == 0:
        _become_worker(fd, writing, plan, folder, guard)
    os.close(fd)
    os.close(writing)
    printed = PrintedLines(reading, 2)
    printed.start()
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, GUARD_NICE)
    how, told = "", Told()
    try:
        how = _watch(child, plan, told)
    finally:
        _kill_all()
        told.spent(spent_by_children(), 0.0)
        printed.join(PRINTED_SECONDS)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        print(how or "ended", flush=True)


# ---------------------------------------------------------------------------------------------------- the worker's side


def _become_worker(fd: int, log: int, plan: WorkerPlan, folder: Path | None, guard: int) -> NoReturn:
    """Give up rights, then run the environment."""
    status = 1
    try:
        os.setsid()
        for stream, where in ((0, os.open(os.devnull, os.O_RDWR)), (1, os.open(os.devnull, os.O_RDWR)), (2, log)):
            os.dup2(where, stream)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        _limit(plan.limits)
        if folder is None:
            _enter_sandbox(fd, plan, guard)
        _run_unconfined(fd, plan.limits, folder, guard)
        status = 0
    except BaseException as error:
        print(f"the worker failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def _enter_sandbox(fd: int, plan: WorkerPlan, guard: int) -> NoReturn:
    program = [sys.executable, "-P", "-m", "relax_server.api.environments.child", str(fd)]
    filter_fd = filter_pipe()
    for passed in (fd, filter_fd):
        os.set_inheritable(passed, True)
    command = enclosed(program, plan.limits, Path(plan.hidden), filter_fd)
    _die_with(guard)
    os.execve(command[0], command, environment("/tmp"))


def _run_unconfined(fd: int, limits: WorkerLimits, folder: Path, guard: int) -> None:
    os.chdir(folder)
    variables = environment(str(folder))
    os.environ.clear()
    os.environ.update(variables)
    if not limits.network:
        unconfined.leave_network()
    unconfined.drop_rights(folder)
    _die_with(guard)
    from relax_server.api.environments.child import run

    run(fd)


def _die_with(guard: int) -> None:
    """End when the guard does; asked last, as a change of user takes it back."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)


def _limit(limits: WorkerLimits) -> None:
    user = os.getuid()
    there = 0 if user == 0 else sum(_threads(p) for p in psutil.process_iter() if _uid(p) == user)
    for what, value in (
        (resource.RLIMIT_AS, ADDRESS_SPACE * limits.memory),
        (resource.RLIMIT_FSIZE, limits.files),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_NPROC, there + THREADS),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))
    now = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, max(now, WORKER_NICE))  # lower than it is only root may make it


# ----------------------------------------------------------------------------------------------------- the guard's side


class Told:
    """What the service was told of the time that the worker's processes spent."""

    def __init__(self) -> None:
        self._told = 0.0

    def spent(self, seconds: float, step: float = STEP) -> None:
        """Tell it how many seconds of a processor they have spent altogether, if these are more than a step more."""
        if seconds - self._told > step:
            print(spent_line(seconds - self._told), flush=True)
            self._told = seconds


def _watch(child: int, plan: WorkerPlan, told: Told) -> str:
    """Wait until the worker ends or must end; returns how."""
    limits, extra = plan.limits, 0 if plan.trusted else OF_BUBBLEWRAP
    spent, debt, last = 0.0, 0.0, time.monotonic()
    tree = Tree(os.getpid())
    while True:
        if _service_gone():
            return "the service is gone"
        ended = _reap(child)
        if ended is not None:
            return ended
        processes = tree.look()
        if len(processes) > limits.processes + extra:  # before anything that takes time for each of them
            _halt(child, plan.trusted)
            return f"had {len(processes) - extra} processes; allowed: {limits.processes}"
        if tree.rests(processes) and debt == 0:
            last = time.monotonic()
            continue
        usage = usage_of(processes, not plan.trusted, limits.network)
        if usage.memory > limits.memory:
            return f"used {usage.memory >> 20} MiB of memory; allowed: {limits.memory >> 20}"
        now = time.monotonic()
        debt = max(0.0, debt + max(0.0, usage.cpu - spent) - limits.cpus * (now - last))
        spent, last = usage.cpu, now
        told.spent(spent)
        if debt > POLL:
            _signal_all(signal.SIGSTOP)
            time.sleep(min(debt / limits.cpus, 1.0))
            _signal_all(signal.SIGCONT)


def _halt(child: int, trusted: bool) -> None:
    """Stop what multiplies: most of it at once, and in the sandbox all, which the system ends with bubblewrap."""
    with contextlib.suppress(ProcessLookupError):
        if trusted:
            os.killpg(child, signal.SIGSTOP)
        else:
            os.kill(child, signal.SIGKILL)


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
            how = _ending(os.waitstatus_to_exitcode(status))


def _ending(code: int) -> str:
    """How a worker ended, whose exit code is 128 and more where bubblewrap tells of a signal."""
    number = -code if code < 0 else code - 128
    known = {one.value: one.name for one in signal.Signals}
    return f"was ended by {known[number]}" if number in known else f"ended with exit code {code}"


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

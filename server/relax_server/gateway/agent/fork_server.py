"""Starts one Python program again and again, by forking a process that has imported its libraries.

`python fork_server.py FD MODULES [-m] PROGRAM …`; only the standard library is used, as the interpreter is the program's.
Requests come over the socket FD, each with the file descriptor for the program's output: `{"number": …, "variables": {…}}`, the
environment variables to add. Answered by lines `{"started": pid, "number": …}` and later `{"ended": pid, "status": …}`. It
ends, and leaves its programs alone, when the socket is closed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
from pathlib import Path

LONGEST = 1 << 16
"""Bytes of a request."""


def serve(control: socket.socket) -> bool:
    """Fork for every request. Returns True in a child, which is to run the program, and False in the end."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, LONGEST)
            tell_of_ended(control)
        if control in ready:
            request, output, _, _ = socket.recv_fds(control, LONGEST, 1)
            if not request:
                return False
            wanted = json.loads(request)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (woken, wakes, control.detach()):
                    os.close(fd)
                become(wanted["variables"], output[0])
                return True
            os.close(output[0])
            control.sendall(json.dumps({"started": pid, "number": wanted["number"]}).encode() + b"\n")


def tell_of_ended(control: socket.socket) -> None:
    """Say which programs have ended, and how."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            control.sendall(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}).encode() + b"\n")


def become(variables: dict[str, str], output: int) -> None:
    """What a process of its own would begin with: a session, an output, an environment, and random numbers of its own."""
    os.setsid()
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
    os.environ.update(variables)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def run(program: list[str]) -> None:
    """The program, as the interpreter would run it."""
    if program[0] == "-m":
        sys.argv[:] = program[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = program
        sys.path.insert(0, str(Path(program[0]).resolve().parent))
        runpy.run_path(program[0], run_name="__main__")


def main() -> None:
    """Import, serve, and in a child run the program; the interpreter then ends as it always does."""
    control, modules, program = socket.socket(fileno=int(sys.argv[1])), sys.argv[2].split(","), sys.argv[3:]
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name in filter(None, modules):
        with contextlib.suppress(Exception):  # the program will say it in its own words
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    if serve(control):
        run(program)


if __name__ == "__main__":
    folder = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != folder]
    main()

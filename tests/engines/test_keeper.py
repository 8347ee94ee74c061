"""The keeper of servers: whoever ends, and however, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from relax_server.engines.foreign import KEEPER

CHILDREN = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""


def family(pid: int) -> list[psutil.Process]:
    """A server of two processes below its keeper, once both are there."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = psutil.Process(pid).children(recursive=True)
        if len(found) == 2:
            return found
        time.sleep(0.05)
    raise AssertionError("the processes did not start")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_its_keeper(number: signal.Signals):
    keeper = subprocess.Popen([sys.executable, "-S", str(KEEPER), str(os.getpid()), sys.executable, "-c", CHILDREN])
    server, child = sorted(family(keeper.pid), key=lambda process: process.pid)
    keeper.send_signal(number)
    keeper.wait(20)
    server.wait(10)
    if number == signal.SIGTERM:
        child.wait(10)
    else:
        child.kill()  # SGLang's own children end with it; this one does not


def test_a_server_ends_with_the_process_that_started_it():
    script = f"""
import os, subprocess, sys, time
keeper = subprocess.Popen([sys.executable, "-S", {str(KEEPER)!r}, str(os.getpid()), sys.executable, "-c", {CHILDREN!r}])
print(keeper.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    keeper = psutil.Process(int(parent.stdout.readline()))
    processes = [keeper, *family(keeper.pid)]
    parent.kill()
    parent.wait(10)
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive


def test_a_server_s_exit_code_is_the_keeper_s():
    command = [sys.executable, "-S", str(KEEPER), str(os.getpid()), sys.executable, "-c", "raise SystemExit(7)"]
    assert subprocess.run(command, timeout=60).returncode == 7


def test_shared_memory_of_a_server_is_removed():
    """Its processes have no time to do it: their resource tracker does, and lives long enough."""
    script = """
import time
from multiprocessing.shared_memory import SharedMemory
print(SharedMemory(create=True, size=1 << 20).name, flush=True)
time.sleep(600)
"""
    command = [sys.executable, "-S", str(KEEPER), str(os.getpid()), sys.executable, "-c", script]
    keeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    memory = Path("/dev/shm", keeper.stdout.readline().strip())
    assert memory.exists()
    keeper.terminate()
    keeper.wait(20)
    assert not memory.exists()

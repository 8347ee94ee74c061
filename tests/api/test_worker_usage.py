"""A guard finds all processes of a worker, and looks closely only at one that does something."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from relax_server.api.environments.usage import EVERY, Tree

PARENT = """
import subprocess, sys, threading, time
child = []
command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
thread = threading.Thread(target=lambda: child.append(subprocess.Popen(command, stdin=subprocess.PIPE)))
thread.start(), thread.join()
print(child[0].pid, flush=True)
for line in sys.stdin:
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    print("computed", flush=True)
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_worker_at_rest_is_seen_to_rest_until_it_computes(parent: subprocess.Popen[str]) -> None:
    assert parent.stdin is not None and parent.stdout is not None
    tree, me = Tree(psutil.Process().pid), parent.pid
    grandchild = int(parent.stdout.readline())
    found = [process.pid for process in tree.look()]
    assert found.index(me) < found.index(grandchild)
    inner = Tree(me)
    assert [process.pid for process in inner.look()] == [grandchild]

    def rests() -> bool:
        return tree.rests([psutil.Process(me), psutil.Process(grandchild)])

    end = time.monotonic() + 60
    while not rests() and time.monotonic() < end:  # it may still be beginning
        time.sleep(0.1)
    seen = [rests() for _ in range(2 * EVERY)]
    assert seen.count(False) == 2, "one look in some is thorough all the same"
    parent.stdin.write("\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == "computed\n"
    assert not rests()


def test_whoever_has_ended_is_found_no_more_and_that_is_no_rest(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    tree, mine = Tree(psutil.Process().pid), {parent.pid, int(parent.stdout.readline())}

    def found() -> list[psutil.Process]:
        return [process for process in tree.look() if process.pid in mine]

    assert {process.pid for process in found()} == mine
    tree.rests(found())
    parent.kill()
    parent.wait(60)
    assert parent.pid not in {process.pid for process in found()}
    assert not tree.rests(found())
    assert Tree(parent.pid).look() == []

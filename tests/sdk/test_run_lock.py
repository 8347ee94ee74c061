"""One program at a time in a run folder: real processes, really killed."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import relax_sdk as relax
from relax_sdk import run_lock
from relax_sdk.run import CONFIG
from relax_sdk.run_lock import Holder, RunLock

HOLD = """
import sys, time
from pathlib import Path
from relax_sdk.run_lock import Holder, RunLock
with RunLock(Path(sys.argv[1]), Holder.here()):
    if "fork" in sys.argv:
        import os
        if os.fork() == 0:
            time.sleep(60)
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another program that has the run in `tmp_path`."""
    with started(tmp_path) as process:
        yield process
        process.kill()


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_program_is_refused_with_the_first_ones_pid_host_and_age(tmp_path, program):
    with pytest.raises(relax.ConfigError) as refused:
        RunLock(tmp_path, Holder.here()).acquire()
    host = re.escape(Holder.here().host)
    assert re.search(
        rf"{re.escape(str(tmp_path))} is in use by process {program.pid} on {host}, since \d+ s", str(refused.value)
    )
    assert f"kill {program.pid}" in str(refused.value)


def test_the_lock_dies_with_its_holder(tmp_path, program):
    program.send_signal(signal.SIGSTOP)  # one that hangs has it still
    with pytest.raises(relax.ConfigError, match="in use"):
        RunLock(tmp_path, Holder.here()).acquire()
    program.kill()
    program.wait()
    with RunLock(tmp_path, Holder.here()) as lock:
        assert lock.enforced


def test_what_a_killed_program_has_forked_does_not_hold_its_lock(tmp_path):
    with started(tmp_path, "fork") as process:
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        process.wait()
        try:
            assert Path(f"/proc/{child}").exists()
            lock, end = RunLock(tmp_path, Holder.here()), time.monotonic() + 20
            while True:  # it may have been killed before the child had let go
                try:
                    lock.acquire()
                    break
                except relax.ConfigError:
                    assert time.monotonic() < end
                    time.sleep(0.05)
            lock.release()
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_a_program_that_is_starting_or_going_on_is_refused_before_it_changes_anything(tmp_path, program):
    written = '{"env": "tone-v0", "steps": 7}'
    (tmp_path / CONFIG).write_text(written)
    trainer = relax.Trainer("tone-v0", folder=tmp_path)
    for resume in (False, True):
        with pytest.raises(relax.ConfigError, match=f"in use by process {program.pid}"):
            trainer.fit(3, resume=resume, progress=False)
    assert (tmp_path / CONFIG).read_text() == written
    assert relax.Run.load(tmp_path).config.steps == 7  # reading is for all


def test_one_program_cannot_carry_a_run_out_twice_and_may_again(tmp_path):
    lock = RunLock(tmp_path, Holder.here())
    with lock, pytest.raises(relax.ConfigError, match=f"in use by process {os.getpid()} "):
        RunLock(tmp_path, Holder.here()).acquire()
    with lock:
        pass


def test_a_file_system_without_locks_is_told_apart_from_a_lock_that_is_held(tmp_path, monkeypatch):
    """Such as Lustre without its option `flock`."""

    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunLock(tmp_path, Holder.here()) as lock:
        assert not lock.enforced


def test_a_process_id_that_is_given_again_is_another_program():
    here = Holder.here()
    assert not here.ended()
    assert Holder(here.pid, here.host, here.machine, here.born + 1, here.since).ended()
    assert not Holder(2**22 + 1, here.host, "another machine", 1, here.since).ended()  # nothing is known of it
    assert Holder.from_dict(vars(here)) == here


def test_ages_are_shown_in_their_unit():
    seen = [run_lock._age(seconds) for seconds in (0.2, 119, 200, 3 * 3600, 3 * 86400)]
    assert seen == ["0 s", "119 s", "3 min", "3 h", "3 days"]
    assert str(Holder(7, "vm1", "m", 1, time.time() - 600)) == "process 7 on vm1, since 10 min"

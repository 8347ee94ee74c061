"""Whole runs on this machine that lose a process, an environment or their shared memory."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from local_runs import SHORT_STEPS, SMALL, Watch, fit_watched, left_behind, trainer
from our_processes import children
from relax_server.journal import open_journal
from relax_server.roles.layout import RunLayout

import relax_sdk as relax


def send_signal(role: str, number: int) -> int:
    """Signal the one process of a role; returns its id."""
    (victim,) = [process for process, command in children().items() if role in " ".join(command)]
    victim.send_signal(number)
    return victim.pid


def went_on(watch: Watch, run: relax.Run, steps: int, replaced: int) -> None:
    """Processes were replaced, every step was done, and no group was lost or trained on twice."""
    assert len([w for w in watch.warnings if "again" in w or "new one" in w or "restarting" in w]) >= replaced
    assert [row["step"] for row in run.metrics] == list(range(1, steps + 1))
    counts = open_journal(RunLayout(run.folder).journal).counts(run.folder.name)
    assert counts.acked == steps * 4 and counts.leased == 0
    assert not left_behind()


class InTurn:
    """Does something to one role after another, each time two steps after the last one is back.

    Args:
        act: gets the role.
    """

    def __init__(self, act: Callable[[str], None]) -> None:
        self.act = act
        self.left = ["policy", "rollout", "engines.embedded"]
        self.next = 2

    def __call__(self, step: int) -> None:
        if self.left and step >= self.next:
            self.next = step + 3
            self.act(self.left.pop(0))


def test_killing_each_process_loses_nothing(tmp_path):
    in_turn = InTurn(lambda role: send_signal(role, signal.SIGKILL) and None)
    watch, run = fit_watched(trainer(tmp_path / "run"), 12, in_turn)
    assert not in_turn.left
    went_on(watch, run, 12, replaced=3)


@pytest.mark.nightly
def test_killing_what_is_just_being_started_loses_nothing(tmp_path):
    """The process that takes a dead one's place dies before it is ready."""
    killed: list[int] = []

    def kill(role: str) -> None:
        killed.append(send_signal(role, signal.SIGKILL))
        threading.Thread(target=kill_next, args=(role, len(killed) + 1)).start()

    def kill_next(role: str, until: int) -> None:
        end = time.monotonic() + 60
        while len(killed) < until and time.monotonic() < end:
            for process, command in children().items():
                if process.pid not in killed and role in " ".join(command):
                    process.kill()
                    killed.append(process.pid)

    in_turn = InTurn(kill)
    watch, run = fit_watched(trainer(tmp_path / "run"), 12, in_turn)
    assert len(killed) == 6
    went_on(watch, run, 12, replaced=3)


@pytest.mark.nightly
def test_a_process_that_hangs_is_replaced(tmp_path, monkeypatch):
    from relax_server.roles import fleet, main_roles

    def freeze(role: str) -> None:
        monkeypatch.setattr(main_roles, "SILENCE_SECONDS", 4.0)
        send_signal(role, signal.SIGSTOP)

    monkeypatch.setattr(fleet, "MAX_MISSES", 1)
    in_turn = InTurn(freeze)
    watch, run = fit_watched(trainer(tmp_path / "run", training=SHORT_STEPS), 12, in_turn)
    assert not in_turn.left
    went_on(watch, run, 12, replaced=3)


@pytest.mark.nightly
def test_shared_memory_that_vanishes_is_made_again(tmp_path):
    """Such as by a clean-up of /dev/shm, with the weights that engines are to load."""

    def clean_up(step: int) -> None:
        if step == 3 and not gone:
            gone.extend(Path("/dev/shm").glob(f"relax-{os.getpid()}-*"))
            # Moved first: a folder that the trainer writes into meanwhile cannot be removed file by file.
            shutil.rmtree(gone[0].rename(gone[0].with_name(f"gone-{gone[0].name}")))

    gone: list[Path] = []
    watch, run = fit_watched(trainer(tmp_path / "run"), 6, clean_up)
    assert len(gone) == 1
    went_on(watch, run, 6, replaced=1)


def test_an_engine_lost_too_often_ends_the_run(tmp_path, monkeypatch):
    def kill(step: int) -> None:
        for process, command in children().items():
            if "engines.embedded" in " ".join(command):
                process.send_signal(signal.SIGKILL)

    monkeypatch.setattr("relax_server.roles.restarts.MAX_RESTARTS", 0)
    with pytest.raises(relax.RunError, match=r"the engine e1 ended 1 times(?s:.)*relax train --resume"):
        fit_watched(trainer(tmp_path / "run"), 1000, kill)
    assert not left_behind()


class BrokenEnv(relax.Env):
    """Raises in step."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "x", {}

    def step(self, action):
        raise RuntimeError("the battery is empty")


@pytest.mark.nightly
def test_an_environment_that_always_raises_ends_the_run_with_its_error(tmp_path):
    small = SMALL | {"rollout": SMALL["rollout"] | {"max_failed_groups": 3}, "warmup": {}}
    run = relax.Trainer(BrokenEnv, folder=tmp_path / "run", **small)
    with pytest.raises(relax.RunError, match=r"BrokenEnv.*task.*battery is empty"):
        run.fit(steps=2, progress=False)
    assert not left_behind()

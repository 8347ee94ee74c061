"""Ctrl-C, SIGTERM, SIGHUP and a closed terminal, in real runs; `benchmarks/interrupts.py` measures how long they take."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from relax_server.journal import open_journal
from relax_server.roles.layout import RunLayout

import relax_sdk as relax

SETTINGS = ("rollout.groups_per_step=4", "rollout.group_size=4", "rollout.max_turns=1", "eval.every=0", "warmup.batch_size=4")
END_SECONDS = 60.0
"""For what takes two seconds on a machine that has nothing else to do."""


def begin(folder: Path, *settings: str, stderr: int | None = subprocess.PIPE) -> subprocess.Popen[str]:
    """`relax train`, with the signals of a terminal: a shell begins what runs in the background with SIGINT ignored, and
    nohup with SIGHUP."""
    words = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    usual = "signal.signal(signal.SIGINT, signal.default_int_handler); signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    code = f"import signal; {usual}; from relax_sdk.cli import main; main()"
    command = [sys.executable, "-c", code, "train", "tone-v0", "--steps", "100000", "--folder", str(folder), *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, text=True)


def wait_until(condition: Callable[[], object], seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def ended(process: subprocess.Popen[str], folder: Path) -> str:
    """What it said, once it and all that it started are gone."""
    _, said = process.communicate(timeout=END_SECONDS)
    assert "Traceback" not in said and "starting it again" not in said, said
    left = [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]
    assert not left and not list(Path("/dev/shm").glob(f"relax-{process.pid}-*"))
    return said


def goes_on(folder: Path) -> None:
    """The run can be resumed, and nothing of it was lost or trained on twice."""
    done = len(relax.Run.load(folder).metrics)
    run = relax.Trainer.from_run(folder).fit(done + 1, resume=True, progress=False)
    assert [row["step"] for row in run.metrics] == list(range(1, done + 2))
    counts = open_journal(RunLayout(folder).journal).counts(folder.name)
    assert counts.acked == (done + 1) * 4 and counts.leased == 0


def test_ctrl_c_while_the_trainer_warms_up_ends_the_run(tmp_path):
    folder, steps = tmp_path / "run", 60
    with begin(folder, f"warmup.steps={steps}") as process:
        journal = RunLayout(folder).journal
        wait_until(lambda: journal.exists() and len(open_journal(journal).groups("run", "warmup", steps)) == steps)
        process.send_signal(signal.SIGINT)
        said = ended(process, folder)
    assert process.returncode == 130
    assert "stopped while it was starting" in said or "stopped at step 0 of 100000" in said
    settings = json.loads((folder / "config.json").read_text())
    settings["warmup"]["steps"] = 2  # what comes again need not take as long
    (folder / "config.json").write_text(json.dumps(settings))
    goes_on(folder)


@pytest.mark.nightly
@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGHUP,), (signal.SIGINT, signal.SIGINT)], ids=str)
def test_signals_in_training(tmp_path, numbers):
    """One signal ends with a checkpoint of the last step, two end at once; both can be resumed."""
    folder = tmp_path / "run"
    with begin(folder, "warmup.steps=2") as process:
        wait_until(lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").read_text().count("\n") > 2)
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.2 if len(numbers) > 1 else 0)  # two that come together are one to the kernel
        said = ended(process, folder)
    assert process.returncode == 128 + numbers[0]
    assert "stopping" in said and "relax train --resume" in said
    if len(numbers) == 1:
        step = RunLayout(folder).checkpoints()[-1].name
        assert int(step.removeprefix("step_")) == len(relax.Run.load(folder).metrics)
    goes_on(folder)


@pytest.mark.nightly
def test_a_closed_terminal_ends_the_run_with_a_checkpoint(tmp_path):
    """Nobody can be told any more; the checkpoint is saved all the same."""
    folder = tmp_path / "run"
    ours, theirs = pty.openpty()
    process = begin(folder, "warmup.steps=2", stderr=theirs)
    os.close(theirs)
    try:
        wait_until(lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").read_text().count("\n") > 2)
    finally:
        os.close(ours)
    process.send_signal(signal.SIGHUP)  # as the kernel does to what runs in the terminal's foreground
    assert process.wait(END_SECONDS) == 129
    assert int(RunLayout(folder).checkpoints()[-1].name.removeprefix("step_")) == len(relax.Run.load(folder).metrics)
    goes_on(folder)

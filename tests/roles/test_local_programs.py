"""Whole runs on this machine as programs of their own: Ctrl-C, a kill, and a second program in the same folder."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from local_runs import SMALL
from relax_server.journal import open_journal
from relax_server.roles.layout import RunLayout
from relax_server.roles.outputs import drop_after

import relax_sdk as relax


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def test_ctrl_c_ends_with_a_checkpoint_and_can_be_resumed(tmp_path):
    folder = tmp_path / "run"
    script = textwrap.dedent(
        f"""
        import signal
        import relax_sdk as relax
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell begin with it ignored
        relax.Trainer("tone-v0", folder={str(folder)!r}, **{SMALL!r}).fit(steps=100000)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    metrics = folder / "metrics.jsonl"
    assert process.stderr is not None
    for line in process.stderr:
        if " step " in line and metrics.exists() and metrics.read_text():
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(60) != 0
    assert "ended early" in rest and "relax train --resume" in rest
    done = json.loads(metrics.read_text().splitlines()[-1])["step"]
    run = relax.Trainer.from_run(folder).fit(steps=done + 1, resume=True, progress=False)
    assert run.metrics[-1]["step"] == done + 1


def test_a_second_program_is_refused_and_goes_on_at_once_when_the_first_is_killed(tmp_path):
    folder = tmp_path / "run"
    script = f"import relax_sdk as relax; relax.Trainer('tone-v0', folder={str(folder)!r}, **{SMALL!r}).fit(steps=100000)"
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: RunLayout(folder).checkpoints()[1:], 120)
        second = subprocess.run(
            [sys.executable, "-m", "relax_sdk.cli", "train", "--resume", str(folder)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert second.returncode == 1 and f"in use by process {process.pid} on " in second.stderr
        assert relax.Run.load(folder).metrics  # to look on is for all
        process.kill()

    def traces() -> list[str]:
        commands = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
        return [c for c in commands if str(folder) in c] + [str(p) for p in Path("/dev/shm").glob(f"relax-{process.pid}-*")]

    wait_until(lambda: not traces(), 15)
    done = int(RunLayout(folder).checkpoints()[-1].name.removeprefix("step_"))
    drop_after(RunLayout(folder).metrics, done - 1)  # as where the program is killed before it writes a step's row
    run = relax.Trainer.from_run(folder).fit(steps=done + 3, resume=True, progress=False)
    assert [row["step"] for row in run.metrics] == list(range(1, done + 4))
    assert {"reward", "time", "seconds_step"} <= run.metrics[done - 1].keys()
    counts = open_journal(RunLayout(folder).journal).counts(folder.name)
    assert counts.acked == (done + 3) * 4 and counts.leased == 0

"""Ctrl-C at random moments of a run, its start and its warm-up included: how long until it has ended, and does it go on?

    python -m benchmarks.interrupts [--times 20] [--seed 0] [--env tone-v0]

Runs are begun and interrupted in pairs. The first SIGINT comes at a moment drawn evenly from the time in which an undisturbed
run gets to step 8. The run is then resumed; the second comes at most three seconds after a step that it makes then, which also
shows that the first left it resumable. Every run is resumed once more, for one step, before its groups are counted. *Seconds*
are from the signal to the end of the process. *Left* are processes of the run that live on.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from relax_server.journal import open_journal
from relax_server.roles.layout import RunLayout

import relax_sdk as relax
from benchmarks.report import save

GROUPS, LIMIT = 4, 300.0
"""Groups a step; seconds to wait for anything."""
SETTINGS = (f"rollout.groups_per_step={GROUPS}", "rollout.group_size=4", "warmup.steps=100", "eval.every=3", "eval.limit=64")
MAIN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from relax_sdk.cli import main; main()"
"""`relax`; a shell begins what runs in the background with SIGINT ignored."""


class Going:
    """A run under way, fresh or resumed; what it says is kept."""

    def __init__(self, env: str, folder: Path, steps: int = 100_000) -> None:
        self.folder, self.began, self.heard = folder, time.monotonic(), "starting"
        self.done_before = self.steps
        self.lines: list[str] = []
        words = [env, "--folder", str(folder), *(word for setting in SETTINGS for word in ("--set", setting))]
        if (folder / "config.json").exists():
            words = ["--resume", str(folder)]
        command = [sys.executable, "-c", MAIN, "train", *words, "--steps", str(steps)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self._hears = threading.Thread(target=self._hear, daemon=True)
        self._hears.start()

    def _hear(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            for word, stage in (("warming up", "warm-up"), ("first groups", "first groups")):
                if word in line:
                    self.heard = stage

    @property
    def stage(self) -> str:
        """What it is doing: what it said last, until it has made a step."""
        return "training" if self.steps > self.done_before else self.heard

    @property
    def steps(self) -> int:
        """Steps that the folder has figures of."""
        return len(relax.Run.load(self.folder).metrics) if (self.folder / "metrics.jsonl").exists() else 0

    def until_step(self, step: int) -> None:
        """Wait for a step.

        Raises:
            RuntimeError: the run ended, or took too long.
        """
        while self.steps < step:
            if self.process.poll() is not None or time.monotonic() - self.began > LIMIT:
                self.process.kill()
                raise RuntimeError(f"step {step} was not reached:\n" + "\n".join(self.lines[-20:]))
            time.sleep(0.05)

    def interrupt(self) -> dict[str, Any]:
        """Ctrl-C; what came of it."""
        row: dict[str, Any] = {"interrupted in": self.stage, "after seconds": time.monotonic() - self.began}
        sent = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
        row["seconds"] = time.monotonic() - sent
        self._hears.join(LIMIT)
        row["exit code"] = self.process.returncode
        row["started again"] = sum("starting it again" in line for line in self.lines)
        running = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
        row["left"] = sum(str(self.folder) in command for command in running)
        return row


def pair(env: str, folder: Path, after: float, later: float) -> list[dict[str, Any]]:
    """Two interrupts of one run; groups are counted after it has gone on."""
    run = Going(env, folder)
    time.sleep(after)
    rows = [run.interrupt()]
    run = Going(env, folder)
    run.until_step(run.steps + 1)
    time.sleep(later)
    rows.append(run.interrupt())
    steps = run.steps + 1
    last = Going(env, folder, steps)
    if last.process.wait(LIMIT) != 0:
        raise RuntimeError("it cannot be resumed:\n" + "\n".join(last.lines[-20:]))
    counts = open_journal(RunLayout(folder).journal).counts(folder.name)
    for row in rows:
        row |= {"groups taken": steps * GROUPS, "acked": counts.acked, "left leased": counts.leased}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="interrupts in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--env", default="tone-v0")
    args = parser.parse_args()
    rng, rows = random.Random(args.seed), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as temporary:
        undisturbed = Going(args.env, Path(temporary) / "undisturbed")
        undisturbed.until_step(8)
        length = time.monotonic() - undisturbed.began
        rows.append({"moment": 0} | undisturbed.interrupt())
        while len(rows) < args.times:
            folder = Path(temporary) / f"run-{len(rows)}"
            for row in pair(args.env, folder, rng.uniform(0, length), rng.uniform(0, 3)):
                rows.append({"moment": len(rows)} | row)
            summary = {"moment": "all", "seconds": max(row["seconds"] for row in rows)}
            summary["median seconds"] = statistics.median(row["seconds"] for row in rows)
            save("interrupts", [*rows, summary], key="moment", bars={"seconds": 10, "acked": "as many as taken", "left": 0})


if __name__ == "__main__":
    main()

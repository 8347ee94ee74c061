"""SIGKILL of every process of a run at random moments: how long until it trains again, and is anything lost or trained twice?

python -m benchmarks.chaos [--times 20] [--roles engine policy rollout controller] [--env tone-v0]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from relax_server.journal import open_journal
from relax_server.roles.layout import RunLayout
from relax_server.roles.restarts import MAX_RESTARTS

from benchmarks.report import save

ROLES = {"engine": "engines.embedded", "policy": "roles.child policy", "rollout": "roles.child rollout"}
KILLS_A_RUN = MAX_RESTARTS - 1
GROUPS, LIMIT = 8, 180.0
"""Groups a step; seconds to wait for anything."""


def steps_done(folder: Path) -> int:
    """The last step that the metrics of a run know of."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


class Run:
    """`relax train` in a process of its own, watched through its folder."""

    def __init__(self, env: str, folder: Path, steps: int, seed: int) -> None:
        self.folder, self.steps = folder, steps
        settings = (f"rollout.groups_per_step={GROUPS}", "rollout.group_size=8", "training.checkpoint_every=5", "eval.every=0")
        sets = [part for setting in settings for part in ("--set", setting)]
        self.first = ["train", env, "--folder", str(folder), "--steps", str(steps), "--seed", str(seed), *sets]
        self.process = self.start(self.first)

    def start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        log = (self.folder.parent / f"{self.folder.name}.log").open("ab")

        def heed_interrupt() -> None:  # background jobs of a shell begin with it ignored
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        command = [sys.executable, "-m", "relax_sdk.cli", *arguments]
        return subprocess.Popen(command, stderr=log, stdout=log, preexec_fn=heed_interrupt)

    def wait_for_step(self, step: int) -> None:
        """Wait until so many steps are done.

        Raises:
            RuntimeError: the run has ended.
            TimeoutError: it takes too long.
        """
        end = time.monotonic() + LIMIT
        while steps_done(self.folder) < step:
            if self.process.poll() is not None:
                raise RuntimeError(f"the run has ended: {(self.folder.parent / f'{self.folder.name}.log').read_text()[-2000:]}")
            if time.monotonic() > end:
                raise TimeoutError(f"{self.folder}: no step {step} within {LIMIT:.0f} s; see its logs")
            time.sleep(0.05)

    def process_of(self, role: str, other_than: int = 0) -> psutil.Process:
        """The process of a role, waiting for one that is just being started."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end and self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):  # one that has ended has no command line
                    if child.pid != other_than and ROLES[role] in " ".join(child.cmdline()):
                        return child
            time.sleep(0.01)
        raise TimeoutError(f"{self.folder}: no process of the {role} within {LIMIT:.0f} s; see its logs")

    def kill(self, role: str) -> float:
        """Kill one process; returns the seconds until there is another one and two more steps are done."""
        before = steps_done(self.folder)
        if role == "controller":
            self.process.kill()
            self.process.wait()
            killed = time.monotonic()
            self.process = self.start(["train", "--resume", str(self.folder)])
            checkpoint = int(RunLayout(self.folder).checkpoints()[-1].name.removeprefix("step_"))
            end = killed + LIMIT
            while not (checkpoint < steps_done(self.folder) != before) and time.monotonic() < end:
                time.sleep(0.05)
        else:
            victim = self.process_of(role)
            os.kill(victim.pid, signal.SIGKILL)
            killed = time.monotonic()
            self.process_of(role, victim.pid)
            self.wait_for_step(before + 2)  # the one under way may still come from before
        return time.monotonic() - killed


def one_run(env: str, role: str, folder: Path, kills: int, rng: random.Random) -> tuple[list[float], dict[str, int]]:
    """Seconds to recover from each kill, and what the journal says at the end."""
    run = Run(env, folder, steps=1_000_000, seed=rng.randrange(1000))
    seconds: list[float] = []
    try:
        run.wait_for_step(7)  # a checkpoint is there
        for _ in range(kills):
            time.sleep(rng.uniform(0.0, 4.0))
            seconds.append(run.kill(role))
            print(f"{role}: killed, trains again after {seconds[-1]:.1f} s", flush=True)
        run.wait_for_step(steps_done(folder) + 6)
        run.process.send_signal(signal.SIGINT)
        run.process.wait(LIMIT)
    finally:
        run.process.kill()
    return seconds, examine(folder)


def examine(folder: Path) -> dict[str, int]:
    """What the last checkpoint should hold, against the journal: had a group been lost, or trained twice, fewer different ones
    would be acked than the steps took."""
    journal = open_journal(RunLayout(folder).journal)
    counts = journal.counts(folder.name)
    step = int(RunLayout(folder).checkpoints()[-1].name.removeprefix("step_"))
    journal.close()
    return {"taken": step * GROUPS, "acked": counts.acked, "leased": counts.leased}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--roles", nargs="+", default=[*ROLES, "controller"])
    parser.add_argument("--env", default="tone-v0")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, rows = random.Random(args.seed), list[dict[str, Any]]()
    for role in args.roles:
        seconds: list[float] = []
        found: Counter[str] = Counter()
        while len(seconds) < args.times:
            with tempfile.TemporaryDirectory() as temporary:
                kills = min(KILLS_A_RUN, args.times - len(seconds))
                own, end = one_run(args.env, role, Path(temporary) / "run", kills, rng)
            seconds += own
            found.update(end)
        rows.append(
            {
                "killed": role,
                "times": len(seconds),
                "seconds to train again, median": statistics.median(seconds),
                "worst": max(seconds),
                "groups taken by the steps": found["taken"],
                "different groups acked": found["acked"],
                "left leased": found["leased"],
            }
        )
        save("chaos", rows, key="killed", bars={"seconds": 15, "different groups acked": "as many as taken"})


if __name__ == "__main__":
    main()

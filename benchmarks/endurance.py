"""Does it hold? A long asynchronous run, and a great many episodes: the reward, and the memory of every process.

    python -m benchmarks.endurance [--env motion-v0] [--steps 2000] [--episodes 200000]

The run is one `Trainer(env, max_staleness=1).fit()`. Memory is what processes have resident, shared pages included, and what
lies in shared memory, sampled every two seconds; a row is the median over a tenth of the run. The episodes are text, of one
turn, played by one rollout worker with an engine that answers at once; its cache of 4,096 rendered prompts is full after
65,536 of them. Per 1,000: the slope of a straight line through the samples of the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from relax_server.engines.base import GenerateRequest, Generation
from relax_server.journal import open_journal
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from relax_server.rollout import EnginePool, RolloutWorker

import relax_sdk as relax
from benchmarks.envs import Echo
from benchmarks.report import save
from relax_sdk import EnvSpec, MediaStore, RolloutConfig, RunConfig
from tests.scripted_engine import ScriptedEngine

EVERY = 2.0
"""Seconds between looks at memory."""
PARTS = 10
MB = 1 << 20
GROUPS, SIZE = 128, 16
SHARED = Path("/dev/shm")


class Memory(threading.Thread):
    """Looks at the processes below this one until it is told to end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, dict[str, float]]] = []
        """Time, and megabytes by process."""
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(EVERY):
            self.samples.append((time.time(), self._look()))

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        self.join()

    def _look(self) -> dict[str, float]:
        seen: defaultdict[str, float] = defaultdict(float)
        seen["controller"] = psutil.Process().memory_info().rss / MB
        for process in psutil.Process().children(recursive=True):
            try:
                seen[_role(process.cmdline())] += process.memory_info().rss / MB
            except psutil.Error:
                continue
        files = (path for folder in SHARED.glob("relax-*") for path in folder.rglob("*") if path.is_file())
        seen["shared memory"] = sum(_size(path) for path in files) / MB
        return dict(seen)


def _role(command: list[str]) -> str:
    for i, word in enumerate(command):
        if word == "relax_server.roles.child" and i + 1 < len(command):
            return command[i + 1]
        if word == "relax_server.engines.embedded":
            return "engine"
    return "other"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # a version that was just taken away
        return 0


def slope(x: list[float], y: list[float]) -> float:
    """Slope of the straight line through the second half, for 1,000 of x."""
    first = len(x) // 2
    return float(np.polyfit(x[first:], y[first:], 1)[0] * 1000) if len(x) - first > 1 else float("nan")


class Forgetful(ScriptedEngine):
    """Keeps no record of what it was asked."""

    async def generate(self, request: GenerateRequest, timeout: float) -> list[Generation]:
        answers = await super().generate(request, timeout)
        self.requests.clear()
        return answers


def long_run(env: str, steps: int) -> None:
    """One run of many steps."""
    memory = Memory()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        memory.start()
        run = relax.Trainer(env, max_staleness=1, folder=folder).fit(steps=steps)
        memory.stop()
        metrics = run.metrics
        disk = sum(path.stat().st_size for path in folder.glob("journal*")) / MB
    at, done = [row["time"] for row in metrics], [row["step"] for row in metrics]
    trained = [(float(np.interp(t, at, done)), seen) for t, seen in memory.samples if at[0] <= t <= at[-1]]
    roles = ("engine", "policy", "rollout", "controller", "shared memory")
    rows: list[dict[str, Any]] = []
    for part in range(PARTS):
        low, high = part * steps / PARTS, (part + 1) * steps / PARTS
        mine = [row for row in metrics if low < row["step"] <= high]
        looks = [seen for step, seen in trained if low < step <= high]
        held = [row["eval_reward"] for row in mine if row.get("eval_reward") is not None]
        rows.append(
            {
                "steps": f"{low:.0f} to {high:.0f}",
                "reward": statistics.mean(row["reward"] for row in mine),
                "held-out, last": held[-1] if held else None,
                "s a step, median": statistics.median(np.diff([row["time"] for row in mine])),
                "staleness, mean": statistics.mean(row["staleness_mean"] for row in mine),
            }
            | {f"{role} MB": statistics.median(seen.get(role, 0.0) for seen in looks) if looks else None for role in roles}
        )
    x = [step for step, _ in trained]
    slopes = {f"{role}, MB per 1,000 steps": slope(x, [seen.get(role, 0.0) for _, seen in trained]) for role in roles}
    more: dict[str, Any] = {"seconds": at[-1] - at[0], "dropped": metrics[-1]["dropped_total"], "journal, MB on disk": disk}
    more |= slopes
    save("endurance", rows, env=env, mode="asynchronous, max_staleness 1", **more)
    print("\n".join(f"{name}: {value:.3f}" for name, value in more.items()), flush=True)


async def many_episodes(episodes: int) -> None:
    """The core of the rollout alone, and a trainer that has consumed every batch as soon as it is there."""
    rollout = RolloutConfig(groups_per_step=GROUPS, group_size=SIZE, concurrency=2048)
    config = RunConfig(env="bench-v0", max_staleness=0, steps=episodes // (GROUPS * SIZE) + 1, rollout=rollout)
    processor = Processor.load(resolve_model("relax/tiny-omni"))
    rows, x, y = list[dict[str, Any]](), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        journal = open_journal(Path(folder) / "journal.db")
        spec, store = EnvSpec("bench-v0", Echo, None, {"turns": 1}), MediaStore(Path(folder) / "media")
        worker = RolloutWorker(spec, config, processor, EnginePool([Forgetful(processor)]), store, journal, "bench")
        running, consumed = asyncio.create_task(worker.run()), 0
        while consumed * SIZE < episodes and not running.done():
            if worker.admission.committed - consumed < GROUPS:
                await asyncio.sleep(0.002)
                continue
            consumed += GROUPS
            worker.update(version=consumed // GROUPS, consumed=consumed)
            x.append(consumed * SIZE)
            y.append(psutil.Process().memory_info().rss / MB)
            if x[-1] * PARTS >= episodes * (len(rows) + 1):
                rows.append({"episodes": consumed * SIZE, "MB": y[-1]})
                print(f"{consumed * SIZE} episodes, {y[-1]:.0f} MB", flush=True)
        worker.stop()
        await running
        await worker.close()
        journal.close()
    more: dict[str, Any] = {"MB per 1,000 episodes": slope(x, y)}
    save("endurance_episodes", rows, **more)
    print(f"MB per 1,000 episodes: {slope(x, y):.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="motion-v0")
    parser.add_argument("--steps", type=int, default=2000, help="0: no run")
    parser.add_argument("--episodes", type=int, default=200_000, help="0: none")
    args = parser.parse_args()
    if args.episodes:
        asyncio.run(many_episodes(args.episodes))
    if args.steps:
        long_run(args.env, args.steps)


if __name__ == "__main__":
    main()

"""Is a run of this checkout as fast as one of another? Both run at the same time, so that a host whose speed drifts slows both.

    python -m benchmarks.beside OTHER [--env tone-v0] [--mode colocate] [--steps 90] [--times 5]

OTHER is a checkout with an environment of its own (`.venv`). The two share the cores; figures are of the window in which both
train, and are ratios of this one over the other: above 1 it is slower. Results are printed, not kept, as OTHER may be anything.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import table

HERE = Path(__file__).resolve().parents[1]
RUN = """
import sys
import relax_sdk as relax
env, mode, steps, seed, folder = sys.argv[1:]
settings = dict(warmup={"steps": 10}, eval={"every": 0, "limit": 8}, training={"checkpoint_every": 10 * int(steps)})
relax.Trainer(env, mode=mode, seed=int(seed), folder=folder, **settings).fit(steps=int(steps), progress=False)
"""
SKIPPED = 12
"""Steps of a run that are left out at its beginning."""
LIMIT = 1800.0
"""Seconds for a pair of runs."""


def start(checkout: Path, env: str, mode: str, steps: int, seed: int, folder: Path) -> subprocess.Popen[bytes]:
    """A run in a process of its own."""
    command = [checkout / ".venv" / "bin" / "python", "-c", RUN, env, mode, steps, seed, folder]
    more = os.environ | {"OMP_NUM_THREADS": "1"}
    with folder.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(list(map(str, command)), cwd=checkout, env=more, stdout=log, stderr=log)


def figures(rows: list[dict[str, Any]], begin: float, end: float) -> dict[str, float]:
    """Seconds of a step and of its parts in a window of Unix seconds."""
    seen = [row for row in rows if begin <= row["time"] <= end]
    parts = {part: statistics.mean(row[f"seconds_{part}"] for row in seen) for part in ("wait", "train")}
    return {"step": (seen[-1]["time"] - seen[0]["time"]) / (len(seen) - 1)} | parts


def pair(other: Path, env: str, mode: str, steps: int, seed: int) -> dict[str, float]:
    """Both runs at once; the ratios.

    Raises:
        RuntimeError: a run failed; the end of its output is told.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: Path(temporary) / name for name in ("here", "other")}
        places = [("here", HERE), ("other", other)][:: 1 if seed % 2 else -1]
        running = {name: start(place, env, mode, steps, seed, folders[name]) for name, place in places}
        try:
            for name, process in running.items():
                if process.wait(LIMIT):
                    raise RuntimeError(f"{name}: {folders[name].with_suffix('.log').read_text()[-2000:]}")
        finally:
            for process in running.values():
                process.terminate()
        rows = {name: list(map(json.loads, (folder / "metrics.jsonl").open())) for name, folder in folders.items()}
    begin, end = max(r[SKIPPED]["time"] for r in rows.values()), min(r[-1]["time"] for r in rows.values())
    here, there = (figures(rows[name], begin, end) for name in ("here", "other"))
    return {name: here[name] / there[name] for name in here}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--env", default="tone-v0")
    parser.add_argument("--mode", default="colocate")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in range(args.times):
        rows.append({"pair": seed + 1} | pair(args.other.resolve(), args.env, args.mode, args.steps, seed))
        print(rows[-1], flush=True)
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0] if name != "pair"}
    print("\n" + table([*rows, {"pair": "median"} | middle]))


if __name__ == "__main__":
    main()

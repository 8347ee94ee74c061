"""The same run on this machine's processes and on Ray: until its first token and first step, per step, and until the program
has ended.

    python -m benchmarks.ray_runtime [--times 3] [--steps 30] [--env tone-v0]

Both runtimes start what they need and end it: Ray a cluster of its own. They alternate; figures are medians of the repetitions.
*Load* is how long the engines take to be brought to new weights. There is no warm-up: the *first token* is of the engine's
first forward pass after `fit()` was called.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import relax_sdk as relax
from benchmarks.report import save
from relax_sdk.runtime import find_runtime
from relax_sdk.spans import read_spans

WARM = 5
"""First steps, which are not judged."""


def one_run(env: str, runtime: str, folder: Path, steps: int) -> dict[str, float]:
    """Seconds of one run."""
    began, started = time.monotonic(), time.time()
    trainer = relax.Trainer(env, folder=folder, runtime=runtime, eval={"every": 0, "limit": 8}, warmup={"steps": 0})
    rows = trainer.fit(steps=steps, progress=False).metrics
    times = [row["time"] for row in rows]
    spans = [span for name, own in read_spans(folder / "timeline").items() if name.startswith("engine-") for span in own]
    token = min(span["ts"] for span in spans if span["name"] == "generate") / 1e6
    return {
        "first token s": token - started,
        "first step s": times[0] - started,
        "step s": statistics.median(b - a for a, b in zip(times[WARM:], times[WARM + 1 :], strict=False)),
        "load s": statistics.median(row["seconds_load"] for row in rows[WARM:]),
        "whole s": time.monotonic() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--env", default="tone-v0")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"local": [], "ray": []}
    for name in found:
        find_runtime(name)  # that it is installed is known before anything is timed
    for i in range(arguments.times):
        for name, runs in found.items():
            with tempfile.TemporaryDirectory() as folder:
                runs.append(one_run(arguments.env, name, Path(folder) / f"run-{i}", arguments.steps))
            print(name, runs[-1], flush=True)
    rows: list[dict[str, Any]] = [
        {"runtime": name, "runs": len(runs)} | {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in found.items()
    ]
    save("ray_runtime", rows)


if __name__ == "__main__":
    main()

"""Does it learn? Every environment with a fixed budget of steps and several seeds, against its bar.

python -m benchmarks.convergence [--envs tone-v0 …] [--seeds 0 1 2] [--mode async] [--max-staleness 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import relax_sdk as relax
from benchmarks.report import RESULTS, save

BARS: dict[str, tuple[str, float]] = {
    "tone-v0": (">=", 0.95),
    "colour-v0": (">=", 0.93),
    "motion-v0": (">=", 0.93),
    "motion-shuffled-v0": ("chance", 0.5),
    "omni-quiz-v0": (">=", 0.9),
    "higher-lower-v0": (">=", 0.8),
}
"""Held-out greedy reward. `chance`: within three standard errors of 0.5 on 256 tasks. Random play of
higher-lower gives 0.556."""


def one(env: str, seed: int, mode: str, max_staleness: int, folder: Path) -> dict[str, Any]:
    """Train once and report the final held-out reward."""
    trainer = relax.Trainer(env, seed=seed, mode=mode, max_staleness=max_staleness, folder=folder)  # type: ignore[arg-type]
    began = time.perf_counter()
    run = trainer.fit()
    seconds = time.perf_counter() - began
    rows = run.metrics
    held = {row["step"]: round(row["eval_reward"], 3) for row in rows if "eval_reward" in row}
    last = rows[-1]
    return {
        "env": env,
        "seed": seed,
        "steps": last["step"],
        "held_out": last["eval_reward"],
        "ci95": last["eval_ci95"],
        "seconds": seconds,
        "training_seconds": last["time"] - rows[0]["time"] + rows[0]["seconds_step"],
        "seconds_per_step": statistics.median(row["seconds_step"] for row in rows),
        "wait_share": sum(row["seconds_wait"] for row in rows) / sum(row["seconds_step"] for row in rows),
        "staleness": statistics.mean(row["staleness_mean"] for row in rows),
        "dropped": last["dropped_total"],
        "logprob_gap_max": max(row["logprob_gap_max"] for row in rows if row["staleness_max"] == 0)
        if any(row["staleness_max"] == 0 for row in rows)
        else None,
        "curve": held,
    }


def passed(env: str, held_out: float) -> bool:
    kind, bar = BARS[env]
    return abs(held_out - bar) <= 3 * 0.5 / 16 if kind == "chance" else held_out >= bar


def previous(name: str) -> dict[tuple[str, int], dict[str, Any]]:
    """Runs whose results are there already, by environment and seed; a run that is made again takes the place of its row."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return {}
    old = json.loads(path.read_text())
    return {(row["env"], row["seed"]): row | {"curve": curve} for row, curve in zip(old["rows"], old["curves"], strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", nargs="+", default=list(BARS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--mode", default="async")
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    parser.add_argument("--name", default="convergence")
    args = parser.parse_args()
    done = previous(args.name)
    with tempfile.TemporaryDirectory() as temporary:
        root = args.keep or Path(temporary)
        for env in args.envs:
            for seed in args.seeds:
                row = one(env, seed, args.mode, args.max_staleness, root / f"{env}-{seed}")
                kind, bar = BARS[env]
                done[env, seed] = row | {"bar": f"{kind} {bar}", "pass": passed(env, row["held_out"])}
                rows = [done[key] for key in sorted(done)]
                save(args.name, [{k: v for k, v in r.items() if k != "curve"} for r in rows], curves=[r["curve"] for r in rows])
    rows = list(done.values())
    print(f"{sum(r['pass'] for r in rows)} of {len(rows)} runs reach their bar; results in {RESULTS}")


if __name__ == "__main__":
    main()

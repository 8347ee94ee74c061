"""Does it learn? Every environment with a fixed budget of steps and several seeds, against its bar.

python -m benchmarks.convergence [--envs tone-v0 …] [--seeds 0 1 2] [--mode async] [--max-staleness 1]

With `--layouts`, whether it learns as well where several processes train together:
python -m benchmarks.convergence --envs omni-quiz-v0 --layouts tp=1 tp=2 dp=2 --name layout_learning
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import relax_sdk as relax
from benchmarks.report import RESULTS, save
from relax_sdk.layout import LayoutConfig
from relax_sdk.planning import parse_layout

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


def one(env: str, seed: int, layout: LayoutConfig, mode: str, max_staleness: int, folder: Path) -> dict[str, Any]:
    """Train once and report the final held-out reward."""
    trainer = relax.Trainer(
        env,
        seed=seed,
        layout=layout,
        mode=mode,  # type: ignore[arg-type] - text of a flag; the trainer refuses another
        max_staleness=max_staleness,
        folder=folder,
    )
    began = time.perf_counter()
    run = trainer.fit()
    seconds = time.perf_counter() - began
    rows = run.metrics
    held = {row["step"]: round(row["eval_reward"], 3) for row in rows if "eval_reward" in row}
    last = rows[-1]
    return {
        "env": env,
        "layout": str(layout),
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


def previous(name: str) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Runs whose results are there already, by environment, layout and seed; one that is made again replaces its row."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return {}
    old = json.loads(path.read_text())
    rows = [row | {"curve": curve} for row, curve in zip(old["rows"], old["curves"], strict=True)]
    return {(row["env"], row.get("layout", str(LayoutConfig())), row["seed"]): row for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", nargs="+", default=list(BARS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--layouts", nargs="+", type=parse_layout, default=[LayoutConfig()], metavar="tp=2,dp=2")
    parser.add_argument("--mode", default="async")
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    parser.add_argument("--name", default="convergence")
    args = parser.parse_args()
    done = previous(args.name)
    with tempfile.TemporaryDirectory() as temporary:
        root = args.keep or Path(temporary)
        for env in args.envs:
            for seed, layout in itertools.product(args.seeds, args.layouts):
                folder = root / f"{env}-{layout}-{seed}".replace(" ", "-")
                row = one(env, seed, layout, args.mode, args.max_staleness, folder)
                kind, bar = BARS[env]
                done[env, str(layout), seed] = row | {"bar": f"{kind} {bar}", "pass": passed(env, row["held_out"])}
                rows = [done[key] for key in sorted(done)]
                save(args.name, [{k: v for k, v in r.items() if k != "curve"} for r in rows], curves=[r["curve"] for r in rows])
    rows = list(done.values())
    print(f"{sum(r['pass'] for r in rows)} of {len(rows)} runs reach their bar; results in {RESULTS}")


if __name__ == "__main__":
    main()

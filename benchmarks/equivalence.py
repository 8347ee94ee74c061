"""Is the reward the same whether the halves take turns or overlap, and however stale the samples may be?

    python -m benchmarks.equivalence [--envs tone-v0 colour-v0 motion-v0] [--seeds 0 1 2 3 4] [--modes colocate async-4 …]

Every environment is trained with its default settings in every mode with every seed. Each mode is compared with `colocate` by
two one-sided Welch t-tests (TOST): *equivalent* means that, at the 5% level, the difference of the final held-out rewards lies
within ±0.03, which is so exactly when its 90% interval does. Runs that are there already are kept, so that the work can be done
in parts. Curves with bands of one standard deviation and the histograms of observed staleness are drawn to
`results/equivalence.svg`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

import relax_sdk as relax
from benchmarks.report import RESULTS, save

ENVS = ("tone-v0", "colour-v0", "motion-v0")
MORE = ("higher-lower-v0", "omni-quiz-v0")
"""Played only when asked for."""
MODES: dict[str, dict[str, Any]] = {
    "colocate": {"mode": "colocate"},
    "async-0": {"mode": "async", "max_staleness": 0},
    "async-1": {"mode": "async", "max_staleness": 1},
    "async-4": {"mode": "async", "max_staleness": 4},
}
MARGIN, LEVEL = 0.03, 0.05
EVERY = 5
"""Steps to a point of a curve."""
NAME = "equivalence"


def one(env: str, mode: str, seed: int) -> dict[str, Any]:
    """Train once: the final held-out reward, the curve of the training reward, and the staleness that was seen."""
    with tempfile.TemporaryDirectory() as folder:
        run = relax.Trainer(env, seed=seed, folder=Path(folder) / "run", **MODES[mode]).fit(progress=False)
        rows = run.metrics
    seen: Counter[str] = Counter()
    for row in rows:
        seen.update(row["staleness_histogram"])
    parts = [rows[i : i + EVERY] for i in range(0, len(rows), EVERY)]
    return {
        "env": env,
        "mode": mode,
        "seed": seed,
        "held_out": rows[-1]["eval_reward"],
        "dropped": rows[-1]["dropped_total"],
        "staleness": dict(sorted(seen.items())),
        "step": [part[-1]["step"] for part in parts],
        "seconds": [round(part[-1]["time"] - rows[0]["time"], 2) for part in parts],
        "reward": [round(statistics.mean(row["reward"] for row in part), 4) for part in parts],
    }


def equivalent(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """The difference of two means, its 90% interval and the larger p-value of the two one-sided Welch tests that it lies below
    -MARGIN or above +MARGIN (Schuirmann 1987)."""
    difference = statistics.mean(ours) - statistics.mean(theirs)
    variances = [statistics.variance(values) / len(values) for values in (ours, theirs)]
    error = math.sqrt(sum(variances))
    if error == 0:  # every run of both gave the same
        return {"difference": difference, "low": difference, "high": difference, "p": float(abs(difference) >= MARGIN)}
    counts = (len(ours) - 1, len(theirs) - 1)
    freedom = error**4 / sum(v**2 / n for v, n in zip(variances, counts, strict=True))
    half = float(stats.t.ppf(1 - LEVEL, freedom)) * error
    p = max(
        float(stats.t.sf((difference + MARGIN) / error, freedom)), float(stats.t.sf((MARGIN - difference) / error, freedom))
    )
    return {"difference": difference, "low": difference - half, "high": difference + half, "p": p}


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for every environment and mode that has two runs at least."""
    rows = []
    for env in ENVS + MORE:
        held = {m: [run["held_out"] for run in runs if run["env"] == env and run["mode"] == m] for m in MODES}
        for mode, values in held.items():
            if len(values) < 2 or len(held["colocate"]) < 2:
                continue
            seen: Counter[str] = Counter()
            mine = [run for run in runs if run["env"] == env and run["mode"] == mode]
            for run in mine:
                seen.update(run["staleness"])
            test = equivalent(values, held["colocate"]) if mode != "colocate" else None
            versions = ", ".join(f"{key}: {seen[key] / seen.total():.0%}" for key in sorted(seen, key=int))
            row = {"env": env, "mode": mode, "seeds": len(values), "held-out, mean": statistics.mean(values)}
            row |= {"deviation": statistics.stdev(values), "worst": min(values)}
            row |= {
                "difference to colocate": test["difference"] if test else None,
                "its 90% interval": f"{test['low']:+.4f} … {test['high']:+.4f}" if test else None,
                "p (TOST)": test["p"] if test else None,
                "equivalent": test["p"] < LEVEL if test else None,
            }
            row |= {"staleness seen": versions, "dropped": sum(run["dropped"] for run in mine)}
            rows.append(row)
    return rows


def draw(runs: list[dict[str, Any]], file: Path) -> None:
    """Reward against steps and against seconds, mean and deviation over the seeds, and the staleness seen."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = NAME
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    envs = [env for env in ENVS + MORE if any(run["env"] == env for run in runs)]
    figure, axes = plt.subplots(len(envs), 3, figsize=(13, 3.4 * len(envs)), squeeze=False, layout="constrained")
    for line, env in zip(axes, envs, strict=True):
        for place, mode in enumerate(MODES):
            mine = [run for run in runs if run["env"] == env and run["mode"] == mode]
            if not mine:
                continue
            colour = f"C{place}"  # of a mode, whether the others are there or not
            rewards = np.array([run["reward"] for run in mine])
            seconds = np.linspace(0, min(run["seconds"][-1] for run in mine), 60)
            by_time = np.array([np.interp(seconds, run["seconds"], run["reward"]) for run in mine])
            for axis, x, values in ((line[0], mine[0]["step"], rewards), (line[1], seconds, by_time)):
                mean, deviation = values.mean(0), values.std(0)
                axis.plot(x, mean, label=mode, color=colour)
                axis.fill_between(x, mean - deviation, mean + deviation, alpha=0.15, color=colour)
            seen: Counter[str] = Counter()
            for run in mine:
                seen.update(run["staleness"])
            keys = sorted(seen, key=int)
            shares = [seen[key] / seen.total() for key in keys]
            line[2].bar([int(key) + (place - 1.5) * 0.2 for key in keys], shares, 0.2, color=colour)
        line[2].xaxis.set_major_locator(MaxNLocator(integer=True))
        line[0].set(title=env, xlabel="steps", ylabel="training reward")
        line[1].set(title=env, xlabel="seconds", ylabel="training reward")
        line[2].set(title=env, xlabel="staleness observed, versions", ylabel="share of samples")
        line[0].legend(loc="lower right")
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=list(ENVS), choices=ENVS + MORE)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--again", action="store_true", help="repeat runs that are there already")
    args = parser.parse_args()
    path = RESULTS / f"{NAME}.json"
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    done = {(run["env"], run["mode"], run["seed"]): run for run in runs}
    for seed in args.seeds:
        for env in args.envs:
            for mode in args.modes:
                if (env, mode, seed) in done and not args.again:
                    continue
                print(f"{env}, {mode}, seed {seed} …", flush=True)
                done[env, mode, seed] = one(env, mode, seed)
                runs = [done[key] for key in sorted(done)]
                save(NAME, summary(runs), runs=runs, bars={"margin": MARGIN, "level": LEVEL})
    draw(runs, RESULTS / f"{NAME}.svg")
    same = [row["equivalent"] for row in summary(runs) if row["equivalent"] is not None]
    print(f"{sum(same)} of {len(same)} equivalent within {MARGIN}; results in {path}")


if __name__ == "__main__":
    main()

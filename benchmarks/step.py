"""Where does a step's time go, and how close is it to what its halves need?

    python -m benchmarks.step [--envs tone-v0] [--steps 60] [--times 5]

Every environment is trained with `mode="colocate"`, where the two halves take turns, so that the trainer's wait is what
generating a batch takes and the rest is what training and publishing take, each with the machine to itself; and with
`mode="async"`, where they overlap. *Efficiency* is the longer of the two halves over the asynchronous step. `tone-v0` is also
trained by `benchmarks.plain_loop`, a single process without an engine or a journal; that loop has no KL term, whose reference
is a forward more, and is compared with asynchronous training without one. The kinds of run alternate, the first
quarter of the steps is left out, and figures are medians over the repetitions: of a part's median, and of the mean step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import relax_sdk as relax
from benchmarks.report import save
from relax_sdk.spans import read_spans

PLAIN = "tone-v0"
"""The environment that the plain loop can play too."""
LIMIT = 600.0
"""Seconds for a run of the plain loop."""


def train(env: str, mode: Any, steps: int, seed: int, folder: Path, **more: Any) -> dict[str, float]:
    """Seconds of a step, of its parts and of the pause for new weights, and samples a step; `more` are settings."""
    settings: dict[str, Any] = {"warmup": {"steps": 10}, "eval": {"every": 0, "limit": 8}}
    settings |= {"training": {"checkpoint_every": 10 * steps}} | more
    run = relax.Trainer(env, mode=mode, seed=seed, folder=folder, **settings).fit(steps=steps, progress=False)
    rows = run.metrics[steps // 4 :]
    figures = {key: statistics.median(row[f"seconds_{key}"] for row in rows) for key in ("wait", "train", "publish")}
    began, ended = rows[0]["time"], rows[-1]["time"]
    spans = [e for name, events in read_spans(folder / "timeline").items() if name.startswith("engine-") for e in events]
    updates = [e for e in spans if e["name"] == "update weights" and began <= e["ts"] / 1e6 < ended]
    figures["pause"] = sum(e["dur"] for e in updates) / 1e6 / (len(rows) - 1)
    return figures | {"step": (ended - began) / (len(rows) - 1), "n": statistics.mean(row["n_samples"] for row in rows)}


def plain(steps: int) -> float:
    """Seconds of a step of the plain loop, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.plain_loop", "--env", PLAIN, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT)
    return json.loads(done.stdout.splitlines()[-1])["mean"]


def one(env: str, steps: int, seed: int) -> dict[str, float | None]:
    """All kinds of run of one environment, once."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        print(f"{env}: repetition {seed + 1}, {steps} steps of each kind of run", flush=True)
        alone = bare = None
        if env == PLAIN:
            alone = plain(steps)
            bare = train(env, "async", steps, seed, root / "bare", algorithm={"kl_coef": 0.0})["step"]
        turns = train(env, "colocate", steps, seed, root / "colocate")
        overlapped = train(env, "async", steps, seed, root / "async")
    learn = turns["train"] + turns["publish"]
    return {
        "generate": turns["wait"],
        "train": turns["train"],
        "publish": turns["publish"],
        "colocate step": turns["step"],
        "async step": overlapped["step"],
        "of it wait": overlapped["wait"] / overlapped["step"],
        "generation paused": overlapped["pause"] / overlapped["step"],
        "efficiency": max(turns["wait"], learn) / overlapped["step"],
        "colocate / async": turns["step"] / overlapped["step"],
        "samples/s": overlapped["n"] / overlapped["step"],
        "plain step": alone,
        "async step without KL": bare,
        "plain / async": None if alone is None or bare is None else alone / bare,
    }


def middle(values: list[float | None]) -> float | None:
    """The median of what there is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=["tone-v0", "omni-quiz-v0", "higher-lower-v0"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for env in args.envs:
        seen = [one(env, args.steps, seed) for seed in range(args.times)]
        rows.append({"env": env, "times": args.times} | {key: middle([s[key] for s in seen]) for key in seen[0]})
        save(
            "step",
            rows,
            key="env",
            bars={
                "efficiency": 0.9,
                "plain / async": 0.5,
                "generation paused": 0.02,
                "wait": "< 0.05 where training is the longer half",
            },
        )


if __name__ == "__main__":
    main()

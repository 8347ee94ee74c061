"""Does an agent that knows only the `openai` client learn as the built-in loop does, and what does its process cost?

    python -m benchmarks.black_box [--steps 250] [--seeds 0] [--every 50] [--tasks 64]

`omni-quiz-v0` is trained twice with every seed and otherwise the same settings: with the built-in loop, and with
`python -m relax_agents.openai_loop`, a process for every episode that is given a base URL. The two take turns, so that the
machine is the same for both. *Step* columns are the held-out reward after that many steps, played greedily by the same
agent; seconds per step are the median. A process is forked from one that has imported `openai` (docs/agents.md), and a step
has 64 of them, which takes ten seconds on two cores: the defaults take three quarters of an hour.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import relax_sdk as relax
from benchmarks.report import save

ENV = "omni-quiz-v0"
AGENTS: dict[str, str | None] = {"built-in": None, "openai_loop": f"{sys.executable} -m relax_agents.openai_loop"}

AT_ONCE = 32
"""Episodes, and so processes, at the same time."""


def one(name: str, seed: int, steps: int, evaluation: dict[str, int], folder: Path) -> dict[str, Any]:
    """Train once: the curve of the held-out reward, and what a step took."""
    rollout = {"concurrency": AT_ONCE}
    trainer = relax.Trainer(ENV, agent=AGENTS[name], seed=seed, eval=evaluation, rollout=rollout, folder=folder)
    rows = trainer.fit(steps=steps, progress=False).metrics
    return {
        "agent": name,
        "seed": seed,
        "curve": {row["step"]: row["eval_reward"] for row in rows if "eval_reward" in row},
        "seconds per step": statistics.median(row["seconds_step"] for row in rows),
        "wait share": sum(row["seconds_wait"] for row in rows) / sum(row["seconds_step"] for row in rows),
        "dropped": rows[-1]["dropped_total"],
    }


def line(run: dict[str, Any]) -> dict[str, Any]:
    """A run as a row of the table."""
    curve = {f"step {step}": value for step, value in sorted(run["curve"].items())}
    costs = {name: run[name] for name in ("seconds per step", "wait share", "dropped")}
    return {"agent": run["agent"], "seed": run["seed"]} | curve | costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--tasks", type=int, default=64, help="held-out tasks of an evaluation")
    args = parser.parse_args()
    evaluation, runs = {"every": args.every, "limit": args.tasks}, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as temporary:
        for number, seed in enumerate(args.seeds):
            for name in sorted(AGENTS, reverse=number % 2 == 1):
                print(f"{name}, seed {seed} …", flush=True)
                runs.append(one(name, seed, args.steps, evaluation, Path(temporary) / f"{name}-{seed}"))
                runs.sort(key=lambda run: (run["agent"], run["seed"]))
                save("black_box", [line(run) for run in runs], curves=[run["curve"] for run in runs])


if __name__ == "__main__":
    main()

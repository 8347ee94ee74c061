"""Are two on-policy runs with one seed the same run: their tokens, logprobs and weights?

    python -m benchmarks.seeds [--envs tone-v0 omni-quiz-v0] [--engines embedded] [--steps 10] [--seed 5]
                               [--losses recompute engine]

Each environment is trained twice with the same seed in `mode="colocate"`, the loss looking at the trainer's own logprobs
(`recompute`), or at the engine's (`engine`, which is the default of runs). Answers are compared token by token; where two
differ, no token after the first difference is counted as equal, as they have other beginnings. Bar: all tokens are equal.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from relax_server.journal import open_journal
from relax_server.roles.layout import RunLayout
from safetensors.numpy import load_file

import relax_sdk as relax
from benchmarks.report import save
from relax_sdk.trajectory import Turn

LOSSES: dict[str, dict[str, Any]] = {
    "recompute": {"old_logprobs": "recompute", "correction": "none"},
    "engine": {"old_logprobs": "engine"},
}
"""Settings of the algorithm by whose logprobs the loss looks at."""
MOST_GROUPS = 1_000_000


def play(env: str, engine: Any, loss: str, steps: int, seed: int, folder: Path) -> relax.Run:
    """One run."""
    trainer = relax.Trainer(env, engine=engine, mode="colocate", seed=seed, folder=folder, algorithm=LOSSES[loss])
    return trainer.fit(steps, progress=False)


def turns(run: relax.Run) -> dict[tuple[str, int], Turn]:
    """All answers that were trained on, by episode, without the run's name, and number. What was played ahead is left out."""
    journal = open_journal(RunLayout(run.folder).journal)
    try:
        groups = journal.groups(run.folder.name, limit=MOST_GROUPS)
    finally:
        journal.close()
    tasks = run.metrics[-1]["step"] * run.config.rollout.groups_per_step
    played = (trajectory for group in groups if group.task_index < tasks for trajectory in group.trajectories)
    return {(t.id.partition("/")[2], number): turn for t in played for number, turn in enumerate(t.turns)}


def compare(first: dict[tuple[str, int], Turn], second: dict[tuple[str, int], Turn]) -> dict[str, Any]:
    """Tokens, how many of them are equal, and by how much the logprobs of equal ones differ."""
    tokens = equal = 0
    gap = 0.0
    for name in first.keys() | second.keys():
        a, b = (run.get(name) for run in (first, second))
        tokens += max(len(turn.response_ids) for turn in (a, b) if turn is not None)
        if a is None or b is None:
            continue
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a.response_ids, b.response_ids, strict=False)))
        equal += same
        gaps = np.abs(np.subtract(a.response_logprobs[:same], b.response_logprobs[:same]))
        gap = max(gap, float(gaps.max(initial=0.0)))
    return {"answers": len(first), "tokens": tokens, "equal": equal, "logprobs differ by": gap}


def weights_differ(first: relax.Run, second: relax.Run) -> float:
    """The largest difference between two weights."""
    tensors = [
        {name: tensor for file in sorted(run.weights.glob("*.safetensors")) for name, tensor in load_file(file).items()}
        for run in (first, second)
    ]
    return max(float(np.abs(tensor - tensors[1][name]).max(initial=0.0)) for name, tensor in tensors[0].items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=["tone-v0", "omni-quiz-v0"])
    parser.add_argument("--engines", nargs="+", default=["embedded"])
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=["recompute"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for env, engine, loss in itertools.product(args.envs, args.engines, args.losses):
        with tempfile.TemporaryDirectory() as folder:
            runs = [play(env, engine, loss, args.steps, args.seed, Path(folder) / name) for name in ("first", "second")]
            row = {"env": env, "engine": engine, "loss": loss, "steps": args.steps, **compare(*map(turns, runs))}
            rows.append(row | {"weights differ by": weights_differ(*runs)})
    save("seeds", rows, bars={"equal": "all tokens"})


if __name__ == "__main__":
    main()

"""Does a model learn `omni-quiz-v0` with adapters? A first run trains the model a little, the second one only adapters on it.

    python -m benchmarks.lora [--seeds 0 1 2] [--keep FOLDER]

Adapters adapt a model that is trained: on random weights the embedding would stay random. So `relax/tiny-omni` is first trained
whole for 80 steps, warm-up included, which leaves it below the bar. Its export is the model of the second run, in which all its
weights stay as they are and adapters of rank 16, on decoder and towers, are trained.

The learning rate suits a model of this size; the KL coefficient is that of the environment's own settings, and its reference is
the base, with the adapters switched off. The bar is that of `benchmarks.convergence`: a held-out greedy reward of 0.9.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import relax_sdk as relax
from benchmarks.convergence import BARS, passed
from benchmarks.report import save
from relax_sdk.run import CONFIG, WEIGHTS
from relax_sdk.tuning import TARGETS

ENV = "omni-quiz-v0"
BASE_STEPS, STEPS = 80, 200
RANK, LR, KL = 16, 2e-3, 0.06


def base_of(folder: Path, seed: int) -> relax.Run:
    """The first run; one that is in its folder already is taken."""
    if (folder / CONFIG).exists():
        return relax.Run.load(folder)
    return relax.Trainer(ENV, seed=seed, folder=folder).fit(steps=BASE_STEPS)


def held_out(run: relax.Run) -> dict[str, float]:
    """Held-out reward by step."""
    return {str(row["step"]): round(row["eval_reward"], 3) for row in run.metrics if "eval_reward" in row}


def one(seed: int, root: Path) -> dict[str, Any]:
    """Both runs with one seed."""
    base = base_of(root / f"base-{seed}", seed)
    model = root / f"base-{seed}" / WEIGHTS
    began = time.perf_counter()
    trainer = relax.Trainer(
        ENV,
        model=str(model),
        seed=seed,
        folder=root / f"lora-{seed}",
        lora={"rank": RANK, "targets": TARGETS},
        optimizer={"lr": LR},
        algorithm={"kl_coef": KL},
    )
    run = trainer.fit(steps=STEPS)
    last = run.metrics[-1]
    curve = held_out(run)
    return {
        "seed": seed,
        "base steps": BASE_STEPS,
        "base held-out": [*held_out(base).values()][-1],
        "rank": RANK,
        "lr": LR,
        "steps": last["step"],
        "held-out": last["eval_reward"],
        "ci95": last["eval_ci95"],
        "seconds": time.perf_counter() - began,
        "by step": ", ".join(f"{step}: {value}" for step, value in curve.items()),
        "bar": " ".join(map(str, BARS[ENV])),
        "pass": passed(ENV, last["eval_reward"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--keep", type=Path, help="keep the run folders here; a first run that is there is not made again")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for seed in args.seeds:
            save("lora", [one(seed, args.keep or Path(temporary))], key="seed")


if __name__ == "__main__":
    main()

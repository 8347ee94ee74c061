"""How long does the trainer wait for a batch when generation keeps up?

    python -m benchmarks.data_wait [--times 3] [--steps 10] [--cases …] [--buses local transfer_queue]

`long prompts`: 64 one-turn episodes a step, prompts of 600 tokens, answers of 4, every sample computed whole
(`share_prompts=False`), on a model of 1M parameters, so that training is the longer half. `stories`: 16 answers of exactly 32
tokens by SmolLM2-135M in bfloat16; `relax train` names the packages that this model needs. `stories, SGLang` is the same with
SGLang for an engine (`make .venv-sglang`), played only when asked for: there, on two cores, generating is the longer half.

*Wait* is all of a step before its training begins: looking for groups, leasing and decoding them and, over TransferQueue,
fetching what other roles have computed. *Share* is the sum of all waits over the sum of all steps; the first two steps, for
which nothing could be played ahead, are left out. *Ready* are the groups that were there to be taken beyond the batch. *Load*
is from telling the engine of new weights to its answer, within which generation stands still (`weights` measures how long of
it). Ways alternate; figures are medians over the repetitions.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from relax_server.models.catalog import SMOLLM2

import relax_sdk as relax
from benchmarks.report import save
from benchmarks.trl import Stories
from relax_sdk.env import ResetResult, StepResult
from relax_sdk.messages import AssistantMessage

BAR = 0.005
FIRST = 2
"""Steps that are left out."""
LETTERS = 600
"""Letters of a prompt; the tiny models have a token for every byte."""


class LongPrompts(relax.Env):
    """A page of letters, of which the last is asked for: training computes much, generation little."""

    blocking = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        self.page = "".join(chr(97 + int(i)) for i in self.np_random.integers(0, 26, LETTERS))
        return self.page, {}

    def step(self, action: AssistantMessage) -> StepResult:
        return None, float(action.text[:1] == self.page[-1]), True, False, {}


STORIES: dict[str, Any] = {
    "sampling": {"max_new_tokens": 32, "ignore_eos": True},
    "rollout": {"groups_per_step": 4, "group_size": 4},
    "training": {"dtype": "bfloat16", "checkpoint_every": 1000},
    "optimizer": {"lr": 1e-6},
}
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "long prompts": (
        LongPrompts,
        "relax/tiny-llama",
        {
            "sampling": {"max_new_tokens": 4},
            "rollout": {"groups_per_step": 8, "group_size": 8},
            "training": {"share_prompts": False, "checkpoint_every": 1000},
        },
    ),
    "stories": (Stories, SMOLLM2, STORIES),
    "stories, SGLang": (Stories, SMOLLM2, STORIES | {"engine": "sglang"}),
}


def one(case: str, bus: str, steps: int, seed: int) -> dict[str, float]:
    """One run."""
    env, model, settings = CASES[case]
    more: dict[str, Any] = {"bus": bus, "warmup": {"steps": 0}, "eval": {"every": 0, "limit": 1}} | settings
    with tempfile.TemporaryDirectory() as folder:
        run = relax.Trainer(env, model, seed=seed, folder=Path(folder) / "run", **more).fit(steps=steps, progress=False)
        rows = run.metrics[FIRST:]
    return {
        "step, s": statistics.median(row["seconds_step"] for row in rows),
        "wait, ms": 1e3 * statistics.median(row["seconds_wait"] for row in rows),
        "share": sum(row["seconds_wait"] for row in rows) / sum(row["seconds_step"] for row in rows),
        "worst, ms": 1e3 * max(row["seconds_wait"] for row in rows),
        "groups ready": statistics.median(row["queue"] for row in rows),
        "load, s": statistics.median(row["seconds_load"] for row in rows),
        "load, share": sum(row["seconds_load"] for row in rows) / sum(row["seconds_step"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES)[:2], choices=list(CASES))
    parser.add_argument("--buses", nargs="+", default=["local", "transfer_queue"], choices=["local", "transfer_queue"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args()
    if args.steps <= FIRST:
        parser.error(f"--steps must be more than {FIRST}")
    rows: list[dict[str, Any]] = []
    for case in args.cases:
        seen: dict[str, list[dict[str, float]]] = {bus: [] for bus in args.buses}
        for seed in range(args.times):
            for bus, runs in seen.items():
                runs.append(one(case, bus, args.steps, seed))
                print(f"{case}, {bus}, repetition {seed + 1} of {args.times}: {runs[-1]}", flush=True)
        for bus, runs in seen.items():
            row = {"case": case, "bus": bus, "times": len(runs)}
            rows.append(row | {key: statistics.median(run[key] for run in runs) for key in runs[0]})
        save("data_wait", rows, key="case", steps=args.steps, bars={"share": BAR})


if __name__ == "__main__":
    main()

"""Beside TRL 1.16 `GRPOTrainer`: the same model, task, prompts, batch and optimizer on the same cores in one run.

    make .venv-trl
    python -m benchmarks.trl --python .venv-trl/bin/python [--tasks letters stories] [--times 5]

`letters`: a random text model of 1M parameters learns to answer "042 say C:" with the letter; 256 samples of 4 tokens a step.
`stories`: SmolLM2-135M in bfloat16, 16 samples of exactly 32 tokens a step; for speed only. TRL has generation and training in
one process and gets a thread for every core (`--threads`); ours has them side by side, one thread each (`mode="async"`,
staleness 1). Repetitions take turns; the first quarter of the steps is left out. *To 0.9* are the seconds of training until
the held-out greedy reward is 0.9 for the first time, asked every 10 steps, within 300; TRL stops there. Its evaluations are
not counted, ours are played while training goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import relax_sdk as relax
from benchmarks.report import save
from relax_sdk.env import ResetResult, StepResult
from relax_sdk.messages import AssistantMessage

LETTERS = "ABCD"
GOAL = 0.9
LIMIT = 1800.0
"""Seconds for a run of TRL."""


def rows(split: str) -> list[dict[str, str]]:
    """Prompts and answers: 800 numbers to train on, 64 others held out."""
    numbers = range(800) if split == "train" else range(800, 864)
    return [{"prompt": f"{n:03d} say {LETTERS[n * 7 % 11 % 4]}:", "answer": LETTERS[n * 7 % 11 % 4]} for n in numbers]


class Letters(relax.Env):
    """Say the letter that the prompt names."""

    blocking = False
    tasks = staticmethod(lambda: {"train": rows("train"), "eval": rows("eval")})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        assert options is not None
        self.answer = options["task"]["answer"]
        return options["task"]["prompt"], {}

    def step(self, action: AssistantMessage) -> StepResult:
        return None, float(action.text.startswith(self.answer)), True, False, {}


def stories() -> list[dict[str, str]]:
    return [{"prompt": f"Write a short story number {n} about a robot.", "answer": ""} for n in range(100)]


class Stories(relax.Env):
    """The reward is the share of the letter e, only to have one."""

    blocking = False
    tasks = staticmethod(lambda: {"train": stories(), "eval": stories()[:1]})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        assert options is not None
        return options["task"]["prompt"], {}

    def step(self, action: AssistantMessage) -> StepResult:
        return None, action.text.count("e") / max(len(action.text), 1), True, False, {}


@dataclass(frozen=True)
class Work:
    """A task and its settings, for both."""

    env: type[relax.Env]
    prompts: int
    size: int
    new: int
    full: bool
    steps: int
    lr: float
    dtype: str
    eval_every: int


WORK = {
    "letters": Work(Letters, 16, 16, 4, False, 300, 5e-4, "float32", 10),
    "stories": Work(Stories, 4, 4, 32, True, 6, 1e-6, "bfloat16", 0),
}


def small_model(folder: Path) -> Path:
    """A random Llama of 1M parameters, initialised as transformers does it, with our byte-level tokenizer."""
    import torch
    from relax_server.models.catalog import resolve_model
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("relax/tiny-llama"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def model_of(task: str, folder: Path) -> Path:
    from relax_server.models.catalog import SMOLLM2, resolve_model

    return small_model(folder / "model") if task == "letters" else resolve_model(SMOLLM2)


def steady(seconds: Sequence[float]) -> float:
    """Mean seconds of a step, the first quarter left out."""
    return statistics.mean(seconds[len(seconds) // 4 :])


def trl(python: Path, work: Work, model: Path, seed: int, threads: int, folder: Path) -> dict[str, float | None]:
    """One run of TRL."""
    file = folder / "rows.json"
    tasks = work.env.tasks()  # type: ignore[operator]
    file.write_text(json.dumps({split: tasks[split] for split in ("train", "eval")}))
    program = Path(__file__).parent / "peers" / "trl_grpo.py"
    command: list[Any] = [python, program, "--model", model, "--rows", file, "--folder", folder / "trl", "--seed", seed]
    command += ["--prompts", work.prompts, "--size", work.size, "--new", work.new, "--steps", work.steps, "--lr", work.lr]
    command += ["--dtype", work.dtype, "--threads", threads, "--eval-every", work.eval_every, "--goal", GOAL] + [
        "--full"
    ] * work.full
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=LIMIT, env=environment)
    if done.returncode:
        raise RuntimeError(f"TRL: {done.stderr[-3000:]}")
    seen = json.loads(done.stdout.splitlines()[-1])
    reached = next((seconds for _, seconds, reward in seen["held_out"] if reward >= GOAL), None)
    return {"step": steady(seen["seconds"]), "to": reached, "last": seen["held_out"][-1][2] if seen["held_out"] else None}


def ours(work: Work, model: Path, seed: int, folder: Path) -> dict[str, float | None]:
    """One run of ours, with TRL's defaults where the two differ."""
    settings: dict[str, Any] = {
        "sampling": {"max_new_tokens": work.new, "ignore_eos": work.full},
        "rollout": {"groups_per_step": work.prompts, "group_size": work.size},
        "algorithm": {"entropy_coef": 0.0, "clip_high": 0.2},
        "optimizer": {"lr": work.lr, "decay": "constant", "beta2": 0.999},
        "training": {"dtype": work.dtype, "checkpoint_every": 10 * work.steps},
        "eval": {"every": work.eval_every, "limit": 64},
    }
    trainer = relax.Trainer(work.env, str(model), seed=seed, folder=folder / "run", **settings)
    metrics = trainer.fit(steps=work.steps, progress=False).metrics
    began = metrics[0]["time"] - metrics[0]["seconds_step"]
    ends = [row["time"] - began for row in metrics]
    held = [(end, row["eval_reward"]) for end, row in zip(ends, metrics, strict=True) if "eval_reward" in row]
    reached = next((end for end, reward in held if reward >= GOAL), None) if work.eval_every else None
    seconds = [after - before for before, after in zip([0.0, *ends], ends, strict=False)]
    return {"step": steady(seconds), "to": reached, "last": held[-1][1] if work.eval_every and held else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="of an environment with TRL")
    parser.add_argument("--tasks", nargs="+", default=list(WORK), choices=list(WORK))
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of TRL")
    args = parser.parse_args()
    table: list[dict[str, Any]] = []
    for task in args.tasks:
        work, seen = WORK[task], dict[str, list[dict[str, float | None]]]()
        for seed in range(args.times):
            for name in ("relax", f"TRL 1.16, {args.threads} threads"):
                with tempfile.TemporaryDirectory() as temporary:
                    folder = Path(temporary)
                    model = model_of(task, folder)
                    if name == "relax":
                        figures = ours(work, model, seed, folder)
                    else:
                        figures = trl(args.python, work, model, seed, args.threads, folder)
                seen.setdefault(name, []).append(figures)
                print(f"{task}, repetition {seed + 1}: {name} {figures}", flush=True)
        rows_ = []
        for name, runs in seen.items():
            reached = [run["to"] for run in runs if run["to"] is not None]
            row: dict[str, Any] = {"task": task, "trainer": name, "times": len(runs)}
            row["step, s"] = statistics.median(run["step"] or 0.0 for run in runs)
            row["samples/s"] = work.prompts * work.size / row["step, s"]
            row |= {"reached 0.9": len(reached), "to 0.9, s": statistics.median(reached) if reached else None}
            last = [run["last"] for run in runs if run["last"] is not None]
            rows_.append(row | {"held-out at the end": statistics.mean(last) if last else None})
        own = rows_[0]
        for row in rows_:
            row["relax: times the samples/s"] = own["samples/s"] / row["samples/s"]
            row["times as fast to 0.9"] = row["to 0.9, s"] / own["to 0.9, s"] if row["to 0.9, s"] and own["to 0.9, s"] else None
        table += rows_
        save(
            "trl",
            table,
            key="task",
            bars={"letters": "2 times the samples/s, half the time to 0.9", "stories": "1.5 times the samples/s"},
        )


if __name__ == "__main__":
    main()

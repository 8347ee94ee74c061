"""Does all of Relax Gym work on this machine's GPU, and how fast? One table, within ten minutes, without a network.

    python -m benchmarks.gpu_check [--device cuda|cpu] [--only attention experts parity step engine run]

- *attention*: FlexAttention and dense blocks, result and gradient, against blocks in float64.
- *experts*: a mixture's experts one by one and in one grouped product, result and gradients, against float64.
- *parity*: engine, trainer and transformers say the same logprobs, in float32 and bfloat16.
- *step*: whole training steps of a random 0.6B Qwen3 and a random 0.5B omni model in bfloat16: tokens/s, share of the device's
  peak arithmetic (MFU), memory by kind.
- *engine*: tokens/s of the embedded engine with the 0.6B model, and how long it takes, and stands still for, new weights.
- *run*: `tone-v0` trained for a few steps, with all processes of a run; once with `mode="colocate"`.

Each part is a process of its own with a time limit; one that fails is told in the table, and the others go on. With
`--device cpu` the same program runs with tiny models: it shows that the program works, and nothing of a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu_kernels import attention, experts
from benchmarks.gpu_rows import Row, device_name, wait_for_device
from benchmarks.report import RESULTS, machine, save, write

NEEDS = (
    "gpu_check needs one NVIDIA GPU with 24 GB or more, a CUDA build of PyTorch, 8 GB of free disk in the temporary folder and "
    "about ten minutes; no network. `--device cpu` runs the same program with tiny models."
)
LIMIT = 150.0
"""Seconds for one part, on a GPU."""
TOTAL = 600.0
"""Seconds for all parts, on a GPU; a part that begins late has what is left of them."""
CPU_LIMIT = 900.0

PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12, "4090": 165e12}
"""Operations per second in bfloat16 without sparsity, from NVIDIA's data sheets, by a part of the device's name."""


# ---------------------------------------------------------------------------------------------------------------- parity


def parity(small: bool) -> list[Row]:
    """Engine, trainer and transformers on the same tokens; the bars are those of `benchmarks.parity`."""
    import numpy as np

    from benchmarks import parity as bench
    from relax_sdk.media import MediaStore

    wanted = [
        case for case in bench.CASES if case.name in ("text", "mixed") and (case.dtype == "bfloat16") == (len(case.turns) > 1)
    ]
    if small:
        wanted = [case for case in wanted if case.name == "mixed"]
    bench.CASES[:] = [replace(case, turns=case.turns[:1]) for case in wanted]
    args = argparse.Namespace(tokens=16 if small else 32, samples=8)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        folder, store = bench.sharpen(root / "model", 0), MediaStore(root / "media")
        samples = asyncio.run(bench.sample_all(folder, store, args))
        hf = {dtype: bench.reference(folder, store, samples, dtype) for dtype in ("float32", "bfloat16")}
        for case, rows_of in samples.items():
            trainer = policy(folder, dtype=case.dtype)
            says = np.concatenate(trainer.logprobs(rows_of, lambda ref: store.get(ref)))
            found, name = bench.row(case, rows_of, says, hf), f"{case.name}, {case.dtype}"
            if case.dtype == "float32":
                rows += [Row("parity", name, key, found[key], bar) for key, bar in bench.BARS.items()]
            else:
                own = {what: bench.BF16_BAR * found[f"bf16 itself {what}"] for what in bench.QUANTILES}
                rows += [
                    Row("parity", name, f"engine-trainer {w}", found[f"engine-trainer {w}"], bar) for w, bar in own.items()
                ]
    return rows


def policy(folder: Path, **training: Any) -> Any:
    """A trainer without a reference."""
    from relax_server.training.policy import PolicyModel

    import relax_sdk as relax

    return PolicyModel(
        folder,
        algorithm=relax.AlgorithmConfig(kl_coef=0.0),
        optimizer=relax.OptimizerConfig(lr=1e-6),
        training=relax.TrainingConfig(**training),
        total_steps=100,
        seed=0,
    )


# ------------------------------------------------------------------------------------------------------------------ step


def step(small: bool) -> list[Row]:
    """Whole training steps of two random models."""
    from benchmarks.gpu_models import omni_model, text_model

    rows: list[Row] = []
    for name, build in (("Qwen3", text_model), ("omni", omni_model)):
        with tempfile.TemporaryDirectory() as temporary:
            rows += steps_of(name, build(Path(temporary) / "model", small), small)
    return rows


def steps_of(name: str, folder: Path, small: bool) -> list[Row]:
    """Steps of one model on random groups, in bfloat16 with masters in float32; after one to warm up, five are measured."""
    import torch

    from benchmarks.gpu_groups import distinct_items, random_groups

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    trainer = policy(folder, dtype="bfloat16", token_budget=1024 if small else 8192)
    groups, media = random_groups(trainer.processor, 2 if small else 8, 64 if small else 512)
    trainer.train_step(groups, media, version=0)
    held = held_bytes(trainer)
    times, tokens, metrics = [], 0.0, dict[str, float]()
    for number in range(1 if small else 5):
        wait_for_device()
        began = time.perf_counter()
        metrics = trainer.train_step(groups, media, version=1 + number)
        wait_for_device()
        times.append(time.perf_counter() - began)
        tokens = metrics["forest_tokens"]
    took, active = statistics.median(times), active_parameters(trainer)
    rows = [
        Row("step", name, "parameters", float(sum(p.numel() for p in trainer._loaded.model.parameters()))),
        Row("step", name, "seconds", took),
        Row("step", name, "tokens/s", tokens / took),
    ]
    peak = next((value for part, value in PEAK.items() if on_gpu and part in device_name()), None)
    rows.append(Row("step", name, "MFU", None if peak is None else 6 * active * tokens / took / peak))
    forest = math.ceil(tokens / metrics["forests"])  # packing fills them evenly, and not up to the budget
    items = distinct_items(trainer.processor, groups, media)
    planned = planned_rank(folder, replace(trainer.training, token_budget=forest), items, metrics["forests"])
    for kind, size in held.items():
        rows.append(Row("step", name, f"{kind}, MB", size / 1e6))
        rows.append(Row("step", name, f"{kind} as planned, MB", getattr(planned, kind) / 1e6))
        rows.append(Row("step", name, f"{kind}: difference from the plan", abs(size - getattr(planned, kind)) / size, 0.1))
    rows.append(Row("step", name, "tokens of a forest", float(forest)))
    computed = planned.activations + planned.towers + planned.logits
    rows.append(Row("step", name, "activations and logits as planned, MB", computed / 1e6))
    rows.append(Row("step", name, "of these, planned for towers, MB", planned.towers / 1e6))
    if on_gpu:
        most = torch.cuda.max_memory_allocated() - before
        expected = sum(getattr(planned, kind) for kind in held) + computed
        rows.append(Row("step", name, "peak, MB", most / 1e6))
        rows.append(Row("step", name, "peak as planned, MB", expected / 1e6))
        rows.append(Row("step", name, "activations and logits at the peak, MB", (most - sum(held.values())) / 1e6))
    return rows


def planned_rank(folder: Path, training: Any, items: list[Any], forests: float) -> Any:
    """What `relax plan` says of one process.

    Args:
        folder: of the model.
        training: with the tokens of a forest as its budget.
        items: different media of all forests.
        forests: how many there are.
    """
    from relax_server.training.memory_plan import plan_layout
    from relax_server.training.planned_model import Model
    from relax_server.training.planned_towers import chunk_tokens, kept_of, media_tokens, tower_bytes_per_token
    from transformers import AutoConfig

    from relax_sdk.layout import LayoutConfig
    from relax_sdk.tuning import Tuning

    model = Model.of(AutoConfig.from_pretrained(folder))
    seen = {tower: n / forests for tower, n in media_tokens(items, chunk_tokens(model)).items()}
    towers = kept_of(seen, tower_bytes_per_token(model, training, Tuning()))
    return plan_layout(model, LayoutConfig(), training, reference=False, flex=True, towers=towers).ranks[0]


def held_bytes(trainer: Any) -> dict[str, int]:
    """Bytes that a policy holds between steps, by kind, each storage once."""
    from relax_server.training.megatron.host_memory import gradients, optimizer_tensors

    held = {
        "weights": list(trainer._loaded.model.parameters()),
        "gradients": gradients(trainer.trainer.wrapped),
        "optimizer": optimizer_tensors(trainer.trainer.optimizer),
    }
    seen: set[int] = set()
    out: dict[str, int] = {}
    for kind, tensors in held.items():
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        out[kind] = sum(size for place, size in storages.items() if place not in seen)
        seen |= set(storages)
    return out


def active_parameters(trainer: Any) -> float:
    """Parameters that a token meets: of the experts, those that it is sent to; towers are not counted."""
    config = trainer._loaded.model.config
    share = (config.moe_router_topk / config.num_moe_experts) if config.num_moe_experts else 1.0
    named = trainer._loaded.model.gpt.named_parameters()
    return sum(
        p.numel() * (share if ".experts." in name else 1.0) for name, p in named if "embedding" not in name or share == 1.0
    )


# ---------------------------------------------------------------------------------------------------------------- engine


def engine(small: bool) -> list[Row]:
    """The embedded engine: throughput, and new weights."""
    from benchmarks.gpu_models import text_model

    with tempfile.TemporaryDirectory() as temporary:
        return asyncio.run(served(text_model(Path(temporary) / "model", small), Path(temporary), small))


async def served(model: Path, root: Path, small: bool) -> list[Row]:
    """One engine with one model."""
    from relax_server.engines.addresses import EngineAddress
    from relax_server.engines.base import GenerateRequest
    from relax_server.engines.kinds import connect, process_of
    from relax_server.engines.settings import EngineSettings

    from benchmarks.weights import by_folder, in_shared_memory, measure
    from relax_sdk.config import SamplingParams

    process = process_of("embedded", model, root / "engine.log", EngineSettings(dtype="bfloat16"))
    await process.start(LIMIT if not small else CPU_LIMIT)
    client = connect(EngineAddress(process.url, "embedded", process.token), model, model)
    try:
        n, length = (4, 16) if small else (128, 256)
        sampling = SamplingParams(max_new_tokens=length, ignore_eos=True)
        rows: list[Row] = []
        for batch in (1, n):
            requests = [GenerateRequest(list(range(40, 72 + i % 8)), sampling, rid=f"{batch}-{i}") for i in range(batch)]
            began = time.perf_counter()
            answers = await asyncio.gather(*(client.generate(r, timeout=LIMIT * 4) for r in requests))
            taken = time.perf_counter() - began
            made = sum(len(g.response_ids) for answer in answers for g in answer)
            rows.append(Row("engine", f"{batch} at once", "tokens/s", made / taken))
        with in_shared_memory(model, "engine") as weights:
            send = by_folder(client, weights)
            await measure(client, send, 1)
            seen = [await measure(client, send, 2 + i) for i in range(1 if small else 3)]
        rows += [Row("publishing", "through shared memory", k, statistics.median(s[k] for s in seen)) for k in seen[0]]
    finally:
        await client.close()
        await process.stop()
    return rows


# ------------------------------------------------------------------------------------------------------------------- run


def run(small: bool) -> list[Row]:
    """Short runs with all their processes: side by side, and taking turns, when the trainer leaves the device to the engine."""
    steps = (2, 2) if small else (40, 8)
    return [*one_run(small, steps[0], mode="async"), *one_run(small, steps[1], mode="colocate")]


def one_run(small: bool, steps: int, mode: Literal["async", "colocate"]) -> list[Row]:
    """`tone-v0` in one mode; evaluated at its end."""
    import relax_sdk as relax

    case, settings = f"tone-v0, {steps} steps, {mode}", dict[str, Any](mode=mode, eval={"every": 0})
    if small:
        settings |= {"warmup": {"steps": 2}, "eval": {"every": 0, "limit": 8}}
        settings |= {"rollout": {"groups_per_step": 2, "group_size": 2}}
    with tempfile.TemporaryDirectory() as temporary:
        began = time.perf_counter()
        done = relax.Trainer("tone-v0", seed=0, folder=Path(temporary) / "run", **settings).fit(steps=steps, progress=False)
        taken, metrics = time.perf_counter() - began, done.metrics
    held_out = next(row["eval_reward"] for row in reversed(metrics) if "eval_reward" in row)
    fresh = [row["logprob_gap_max"] for row in metrics if row["staleness_max"] == 0]  # others have been learnt from since
    return [
        Row("run", case, "seconds", taken),
        Row("run", case, "seconds of a step", statistics.median(row["seconds_step"] for row in metrics)),
        Row("run", case, "held-out reward", held_out),
        Row("run", case, "largest gap of logprobs of fresh answers", max(fresh, default=None), 1e-3),
    ]


PARTS: dict[str, Callable[[bool], list[Row]]] = dict(
    attention=attention, experts=experts, parity=parity, step=step, engine=engine, run=run
)


def in_process(part: str, small: bool, limit: float) -> list[dict[str, Any]]:
    """The rows of a part, from a process of its own with so many seconds; one that fails is a row that says so."""
    print(f"{part} …", flush=True)
    env = (
        os.environ
        | ({"CUDA_VISIBLE_DEVICES": ""} if small else {})
        | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    )
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "rows.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu_check",
            "--part",
            part,
            "--to",
            str(out),
            "--device",
            "cpu" if small else "cuda",
        ]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=max(limit, 0.0))
            said = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        except subprocess.TimeoutExpired as late:
            said = late.stderr or ""  # bytes, though text is asked for, in the Python versions that there are
            print((said.decode(errors="replace") if isinstance(said, bytes) else said)[-4000:], file=sys.stderr)
            return [Row(part, "", f"not done within {late.timeout:.0f} s", None, 0.0).plain()]
        if done.returncode or not out.exists():
            print(done.stderr[-4000:], file=sys.stderr)
            return [Row(part, "", f"failed: {said[0][:200]}", None, 0.0).plain()]
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--results", type=Path, default=RESULTS, help="Folder of the JSON.")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    small = args.device == "cpu"
    if args.part:
        args.to.write_text(json.dumps([row.plain() for row in PARTS[args.part](small)], default=float))
        return
    print(NEEDS, flush=True)
    import torch

    if not small and not torch.cuda.is_available():
        built = "a CUDA build that sees no GPU" if torch.version.cuda else "a CPU build"
        raise SystemExit(
            f"no GPU: PyTorch {torch.__version__} is {built}; `--device cpu` runs the same program with tiny models"
        )
    name, where = ("gpu_check_on_cpu", "CPU") if small else ("gpu_check", device_name())
    began, rows, told = time.perf_counter(), list[dict[str, Any]](), dict[str, Any](device=where, torch=torch.__version__)
    for part in args.only:
        left = TOTAL - (time.perf_counter() - began)
        rows += in_process(part, small, CPU_LIMIT if small else min(LIMIT, left))
        told["seconds"] = time.perf_counter() - began
        write(name, rows, machine(), folder=args.results, **told)  # a check that is broken off leaves what it has
        print(f"{part}: done after {told['seconds']:.0f} s", flush=True)
    print(f"device: {where}, PyTorch {torch.__version__}, {told['seconds']:.0f} s")
    save(name, rows, folder=args.results, **told)
    if any(row["ok"] == "NO" for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

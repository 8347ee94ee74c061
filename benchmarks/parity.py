"""Do engine, trainer and transformers mean the same distribution? Largest and mean difference of logprobs.

Samples are drawn by the embedded engine over HTTP, for every modality, in one turn and in three, with an image that arrives in
a tool's result, and under top-p; the trainer (Megatron, packed forests) and transformers (one plain forward a sample) then say
what they think of the very same tokens.

In float32 the bars are absolute. In bfloat16 every operation rounds to 8 bits, and engine and trainer group and order theirs
differently: cached against packed attention, one expert at a time against grouped. So each differs from the float32 model by
an error of bfloat16's own size, and the two from each other by about √2 of it where the errors are independent. That size is
measured on the same tokens: transformers in bfloat16 against transformers in float32 (`bf16 itself`). The bars are 1.5 times
its median and its 90% quantile. The largest differences have no bar: where two experts are nearly tied, rounding decides which
one is taken, and a token then differs by far more than rounding, in either pair.

Media features beside transformers' own processors come last (`benchmarks.media_table`), into a table of their own.

    make .venv-processors
    python -m benchmarks.parity [--tokens 32] [--samples 8] [--processors .venv-processors/bin/python]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from relax_server.engines.base import GenerateRequest, MediaItem
from relax_server.engines.http import HttpEngine
from relax_server.engines.process import EngineProcess
from relax_server.engines.settings import EngineSettings
from relax_server.models.catalog import resolve_model
from relax_server.models.device import this_device
from relax_server.models.hf_inputs import hf_inputs
from relax_server.models.processor import Processor
from relax_server.rollout.recorder import TokenRecorder
from relax_server.rollout.rendering import Renderer

import relax_sdk as relax
from benchmarks.media_table import BAR, measure
from benchmarks.report import save
from relax_sdk.media import Media, MediaStore
from relax_sdk.trajectory import Trajectory

WHOLE = relax.SamplingParams()
CUT = relax.SamplingParams(top_p=0.9, top_k=40)
"""The sampling for which engine, trainer and reference cut the distribution."""

BARS = {"engine-trainer mean": 1e-5, "engine-trainer max": 1e-4, "trainer-HF max": 1e-5}
BF16_BAR = 1.5
"""The bar is so many times the median, and the 90% quantile, of bfloat16's own error on the same tokens."""

QUANTILES = {"median": 0.5, "90%": 0.9}


@dataclass(frozen=True)
class Case:
    """A kind of conversation."""

    name: str
    turns: tuple[str, ...]
    """Media of each turn by first letter: `i`mage, `a`udio, `v`ideo. `t` marks a tool's result, and is else the user's."""
    sampling: relax.SamplingParams = WHOLE
    dtype: Literal["float32", "bfloat16"] = "float32"


KINDS = {"text": "", "image": "i", "audio": "a", "video": "v", "mixed": "iav"}
TOOLS = {"image of a tool": ("", "ti", ""), "image of a tool, mixed": ("a", "ti", "v")}
CASES = [
    *(Case(name, (kinds,) * turns) for turns in (1, 3) for name, kinds in KINDS.items()),
    *(Case(name, turns) for name, turns in TOOLS.items()),
    *(Case(f"{name}, top-p", (KINDS[name],) * 3, CUT) for name in ("text", "mixed")),
    *(Case(name, (KINDS[name],) * 3, dtype="bfloat16") for name in ("text", "mixed")),
    *(Case(name, turns, dtype="bfloat16") for name, turns in TOOLS.items()),
]


def sharpen(folder: Path, seed: int, scale: float = 1.4) -> Path:
    """The tiny model with larger weights: at its random start all tokens are about equally likely, and nothing could differ."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    source = resolve_model("relax/tiny-omni", seed)
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, value in weights.items():
        if value.dim() > 1:
            value.mul_(scale)
        elif "norm" in name and name.endswith("weight"):
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def part(kind: str, rng: np.random.Generator) -> relax.Image | relax.Audio | relax.Video:
    """A random item of about the size of the shipped tasks."""
    if kind == "i":
        return relax.Image.from_array(rng.integers(0, 255, (64, 96, 3), dtype=np.uint8))
    if kind == "a":
        return relax.Audio.from_array(np.clip(0.3 * rng.standard_normal(24_000), -1, 1))
    return relax.Video.from_array(rng.integers(0, 255, (8, 64, 64, 3), dtype=np.uint8))


async def play(engine: HttpEngine, processor: Processor, store: MediaStore, case: Case, tokens: int, seed: int) -> Trajectory:
    """One conversation, sampled by the engine and recorded token by token."""
    rng = np.random.default_rng(seed)
    recorder = TokenRecorder(Renderer(processor))
    sampling = replace(case.sampling, max_new_tokens=tokens, ignore_eos=True)
    messages: list[relax.Message] = []
    for turn, kinds in enumerate(case.turns):
        content = (*(part(kind, rng) for kind in kinds if kind != "t"), relax.Text(f"question {turn}, go on"))
        tool = kinds.startswith("t")
        messages.append(relax.Message("tool" if tool else "user", content, tool_call_id="call_0" if tool else None))
        plan = recorder.plan(messages)
        for item in plan.new_media:
            store.put(item)
        prompt = recorder.prompt(plan, [features(processor, store, m) for m in plan.new_media])
        media = tuple(MediaItem(m.ref, str(store.path(m.ref))) for m in prompt.media)
        (generation,) = await engine.generate(GenerateRequest(prompt.ids, sampling, media), timeout=120)
        recorded = recorder.record(prompt, generation, [m.ref for m in prompt.media], engine.url, 0.0)
        messages.append(recorder.answer(plan, prompt, recorded))
    return Trajectory(str(seed), "parity", "0", 0, "g", 0, 1, seed, relax.Status.COMPLETED, recorder.turns)


def features(processor: Processor, store: MediaStore, media: Media) -> Any:
    return processor.features(store.get(media.ref), media.ref.sha256, media.ref.kind)


def hf_logprobs(
    model: Any, processor: Processor, sample: relax.Sample, store: MediaStore, sampling: relax.SamplingParams
) -> np.ndarray:
    """Logprobs of mask-1 tokens by one transformers forward over the whole sample, cut by transformers' own warpers."""
    import torch

    items = [processor.features(store.get(ref), ref.sha256, ref.kind) for ref in sample.media]
    ids = torch.tensor([sample.ids], device=model.device)
    inputs = {
        k: v.to(model.device, model.dtype)
        if k in ("pixel_values", "pixel_values_videos", "input_features")
        else v.to(model.device)
        for k, v in hf_inputs(items).items()
    }
    model.model.rope_deltas = None
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits[0].float()
    logits[:, list(processor.banned_ids)] = -torch.inf
    for warp in warpers(sampling):
        logits = warp(ids, logits)
    logprobs = torch.log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
    return logprobs[np.asarray(sample.loss_mask[1:], bool)]


def warpers(sampling: relax.SamplingParams) -> list[Any]:
    """What transformers cuts a distribution with."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    return [TopKLogitsWarper(sampling.top_k), TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []


async def sample_all(folder: Path, store: MediaStore, args: argparse.Namespace) -> dict[Case, list[relax.Sample]]:
    """Samples of every case, from one engine for each dtype."""
    processor = Processor.load(folder)
    out: dict[Case, list[relax.Sample]] = {}
    for dtype in ("float32", "bfloat16"):
        settings = EngineSettings(media_root=store.root, dtype=dtype)
        process = EngineProcess(folder, store.root.parent / f"{dtype}.log", settings)
        await process.start()
        engine = HttpEngine(process.url, store.root, token=process.token)
        try:
            for case in (case for case in CASES if case.dtype == dtype):
                plays = [play(engine, processor, store, case, args.tokens, seed) for seed in range(args.samples)]
                out[case] = [sample for trajectory in await asyncio.gather(*plays) for sample in trajectory.samples()]
        finally:
            await engine.close()
            await process.stop()
    return out


def reference(folder: Path, store: MediaStore, samples: dict[Case, list[relax.Sample]], dtype: str) -> dict[Case, np.ndarray]:
    """What transformers says of the tokens of every case, computed in `dtype`."""
    import torch
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Model

    torch.set_num_threads(1)
    processor, model = Processor.load(folder), Model.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.to(this_device(model.dtype))  # type: ignore[arg-type]
    return {
        case: np.concatenate([hf_logprobs(model, processor, sample, store, case.sampling) for sample in rows])
        for case, rows in samples.items()
    }


def row(case: Case, ss: list[relax.Sample], trainer: np.ndarray, hf: dict[str, dict[Case, np.ndarray]]) -> dict[str, Any]:
    """One line of the table."""
    engine = np.concatenate([np.asarray(s.logprobs)[np.asarray(s.loss_mask, bool)] for s in ss])
    gap = np.abs(engine - trainer)
    out: dict[str, Any] = {
        "prompt": case.name,
        "turns": len(case.turns),
        "dtype": case.dtype,
        "sequences": len(ss),
        "tokens": len(engine),
        "engine-trainer mean": float(gap.mean()),
        "engine-trainer max": float(gap.max()),
        "trainer-HF max": float(np.abs(trainer - hf[case.dtype][case]).max()),
        "logprob mean": float(engine.mean()),
    }
    if case.dtype == "bfloat16":
        own = np.abs(hf["bfloat16"][case] - hf["float32"][case])
        out |= {f"engine-trainer {name}": float(np.quantile(gap, q)) for name, q in QUANTILES.items()}
        out |= {f"bf16 itself {name}": float(np.quantile(own, q)) for name, q in QUANTILES.items()}
        out |= {"bf16 itself mean": float(own.mean()), "bf16 itself max": float(own.max())}
    return out


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """What is not within its bar, in words."""
    out: list[str] = []
    for r in rows:
        name = f"{r['prompt']}, {r['turns']} turns, {r['dtype']}"
        if r["dtype"] == "float32":
            out += [f"{name}: {key} {r[key]:.1e} (bar {bar:.0e})" for key, bar in BARS.items() if not r[key] <= bar]
        for what in QUANTILES if r["dtype"] == "bfloat16" else ():
            bar = BF16_BAR * r[f"bf16 itself {what}"]
            if not r[f"engine-trainer {what}"] <= bar:
                out.append(f"{name}: engine-trainer {what} {r[f'engine-trainer {what}']:.1e} (bar {bar:.1e})")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--processors", help="Python of an environment with torchvision, for the table of media")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        features_rows = measure(args.processors, root / "table")
        folder, store = sharpen(root / "model", 0), MediaStore(root / "media")
        samples = asyncio.run(sample_all(folder, store, args))
        hf = {dtype: reference(folder, store, samples, dtype) for dtype in ("float32", "bfloat16")}

        from relax_server.training.policy import PolicyModel  # patches torch for this process: after transformers has run

        def policy(case: Case) -> Any:
            training = relax.TrainingConfig(dtype=case.dtype)
            configs: dict[str, Any] = dict(algorithm=relax.AlgorithmConfig(), optimizer=relax.OptimizerConfig())
            return PolicyModel(folder, total_steps=1, seed=0, sampling=case.sampling, training=training, **configs)

        rows: list[dict[str, Any]] = []
        for sampling, dtype in dict.fromkeys((case.sampling, case.dtype) for case in CASES):
            cases = [case for case in CASES if (case.sampling, case.dtype) == (sampling, dtype)]
            trainer = policy(cases[0])
            for case in cases:
                says = np.concatenate(trainer.logprobs(samples[case], lambda ref: store.get(ref)))
                rows.append(row(case, samples[case], says, hf))
        exact = export_is_exact(policy(CASES[0]), folder, root / "export")
    save("parity", rows, bars=BARS | {"bfloat16: engine-trainer / bf16 itself, median and 90%": BF16_BAR}, export_exact=exact)
    save("parity_media", features_rows, bars={"worst difference": BAR, "other tokens": 0})
    wrong = missed(rows) + [f"media: {r}" for r in features_rows if r["other tokens"] or not r["worst difference"] <= BAR]
    print(f"HF → Megatron → HF exact: {exact}; out of bounds: {wrong or 'nothing'}")
    if wrong or not exact:
        raise SystemExit(1)


def export_is_exact(policy: Any, folder: Path, out: Path) -> bool:
    """Whether the weights come back from Megatron bit for bit."""
    import torch
    from safetensors.torch import load_file

    policy.export(out)
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    return before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


if __name__ == "__main__":
    main()

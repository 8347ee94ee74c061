"""Do engine, trainer and transformers mean the same distribution? Largest and mean difference of logprobs in fp32.

Samples are drawn by the embedded engine over HTTP, for every modality, in one turn and in three, and with top-p and top-k; the
trainer (Megatron, packed forests) and transformers (one plain forward a sample) then say what they think of these very tokens.

    python -m benchmarks.parity [--tokens 32] [--samples 8]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from relax_server.engines.base import GenerateRequest, MediaItem
from relax_server.engines.http import HttpEngine
from relax_server.engines.process import EngineProcess
from relax_server.engines.settings import EngineSettings
from relax_server.models.catalog import resolve_model
from relax_server.models.hf_inputs import hf_inputs
from relax_server.models.processor import Processor
from relax_server.rollout.recorder import TokenRecorder
from relax_server.rollout.rendering import Renderer

import relax_sdk as relax
from benchmarks.report import save
from relax_sdk.media import Media, MediaRef, MediaStore
from relax_sdk.trajectory import Trajectory

CONTENTS = {"text": "", "image": "i", "audio": "a", "video": "v", "mixed": "iav"}

CUT = relax.SamplingParams(top_p=0.9, top_k=40)
"""The case in which engine, trainer and reference cut the distribution."""


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


async def play(
    engine: HttpEngine,
    processor: Processor,
    store: MediaStore,
    kinds: str,
    turns: int,
    sampling: relax.SamplingParams,
    seed: int,
) -> Trajectory:
    """One conversation, sampled by the engine and recorded token by token."""
    rng = np.random.default_rng(seed)
    recorder = TokenRecorder(Renderer(processor))
    messages: list[relax.Message] = []
    for turn in range(turns):
        shown: list[Any] = [part(kind, rng) for kind in kinds]
        messages.append(relax.Message("user", (*shown, relax.Text(f"question {turn}, go on"))))
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
    """Of the mask-1 tokens, by one plain transformers forward over the whole sample, cut by transformers' own warpers."""
    import torch

    items = [processor.features(store.get(ref), ref.sha256, ref.kind) for ref in sample.media]
    ids = torch.tensor([sample.ids])
    model.model.rope_deltas = None
    with torch.no_grad():
        logits = (
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **hf_inputs(items)).logits[0].float()
        )
    logits[:, list(processor.banned_ids)] = -torch.inf
    for warp in warpers(sampling):
        logits = warp(ids, logits)
    logprobs = torch.log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    return logprobs[np.asarray(sample.loss_mask[1:], bool)]


def warpers(sampling: relax.SamplingParams) -> list[Any]:
    """What transformers cuts a distribution with."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    return [TopKLogitsWarper(sampling.top_k), TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []


async def sample_all(folder: Path, store: MediaStore, args: argparse.Namespace) -> dict[tuple[str, int], list[Trajectory]]:
    processor = Processor.load(folder)
    process = EngineProcess(folder, store.root.parent / "engine.log", EngineSettings(media_root=store.root))
    await process.start()
    engine = HttpEngine(process.url, store.root)
    try:
        out = {}
        whole = relax.SamplingParams()
        cases = [(name, kinds, turns, whole) for turns in (1, 3) for name, kinds in CONTENTS.items()]
        cases += [(f"{name}, top-p", CONTENTS[name], 3, CUT) for name in ("text", "mixed")]
        for name, kinds, turns, cut in cases:
            sampling = dataclasses.replace(cut, max_new_tokens=args.tokens, ignore_eos=True)
            plays = [play(engine, processor, store, kinds, turns, sampling, seed) for seed in range(args.samples)]
            out[name, turns] = list(await asyncio.gather(*plays))
        return out
    finally:
        await engine.close()
        await process.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, store = sharpen(Path(temporary) / "model", 0), MediaStore(Path(temporary) / "media")
        played = asyncio.run(sample_all(folder, store, args))

        import torch
        from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Model

        torch.set_num_threads(1)
        processor, model = Processor.load(folder), Model.from_pretrained(folder, dtype=torch.float32).eval()
        samples = {key: [s for t in ts for s in t.samples()] for key, ts in played.items()}
        cut = {key: CUT if "top-p" in key[0] else relax.SamplingParams() for key in samples}
        reference = {key: [hf_logprobs(model, processor, s, store, cut[key]) for s in ss] for key, ss in samples.items()}

        from relax_server.training.policy import Policy  # patches torch for this process: after transformers has run

        configs: dict[str, Any] = dict(
            algorithm=relax.AlgorithmConfig(), optimizer=relax.OptimizerConfig(), training=relax.TrainingConfig()
        )
        policy = Policy(folder, total_steps=1, seed=0, **configs)
        cutting = Policy(folder, total_steps=1, seed=0, sampling=CUT, **configs)

        def media(ref: MediaRef) -> bytes:
            return store.get(ref)

        rows: list[dict[str, Any]] = []
        for (name, turns), ss in samples.items():
            engine = np.concatenate([np.asarray(s.logprobs)[np.asarray(s.loss_mask, bool)] for s in ss])
            says = cutting if cut[name, turns] is CUT else policy
            trainer = np.concatenate(says.logprobs(ss, media))
            hf = np.concatenate(reference[name, turns])
            rows.append(
                {
                    "prompt": name,
                    "turns": turns,
                    "sequences": len(ss),
                    "tokens": len(engine),
                    "engine-trainer mean": float(np.abs(engine - trainer).mean()),
                    "engine-trainer max": float(np.abs(engine - trainer).max()),
                    "trainer-HF max": float(np.abs(trainer - hf).max()),
                    "logprob mean": float(engine.mean()),
                }
            )
        exact = export_is_exact(policy, folder, Path(temporary) / "export")
    save(
        "parity",
        rows,
        bars={"engine-trainer mean": 1e-5, "engine-trainer max": 1e-4, "trainer-HF max": 1e-5},
        export_exact=exact,
    )
    worst = max(r["engine-trainer mean"] for r in rows), max(r["engine-trainer max"] for r in rows)
    print(f"worst engine-trainer: mean {worst[0]:.1e} (bar 1e-5), max {worst[1]:.1e} (bar 1e-4)")
    print(f"worst trainer-HF: {max(r['trainer-HF max'] for r in rows):.1e} (bar 1e-5); HF → Megatron → HF exact: {exact}")


def export_is_exact(policy: Any, folder: Path, out: Path) -> bool:
    """Whether the weights come back from Megatron bit for bit."""
    import torch
    from safetensors.torch import load_file

    policy.export(out)
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    return before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


if __name__ == "__main__":
    main()

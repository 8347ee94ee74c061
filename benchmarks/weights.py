"""How long does generation stand still while an engine takes new weights, for models of 1.5M, 135M and 600M parameters?

    python -m benchmarks.weights [--times 5] [--sglang .venv-sglang/bin/python] [--models …] [--rank 16]

The weights are a folder in shared memory, as the trainer of a run puts them out. While one answer is streamed, token by token,
the engine is told to load them, several times. *Paused* is what the longest gap between two tokens around an update is longer
than the usual one; *update* is from the command to its answer. Generation is to stand still for at most 2% of a step, so
*a step takes at least* is 50 times the pause: shorter steps miss the bar.

With `--sglang` a real SGLang server reads the folder, and gets the same weights by broadcast.

With `--rank` the embedded engine is sent adapters of that rank as well, on attention, MLP and experts, which it merges into its
base: *times fewer* says how many times the file of all weights is larger than theirs.

The 600M model is a randomly initialised Qwen3 with the byte tokenizer; its size is what counts here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from relax_server.engines.addresses import EngineAddress
from relax_server.engines.base import GenerateRequest
from relax_server.engines.http import HttpEngine
from relax_server.engines.kinds import connect, process_of
from relax_server.engines.settings import EngineSettings
from relax_server.engines.sglang.broadcast import WeightGroup
from relax_server.engines.sglang.client import SglangEngine
from relax_server.models.adapter_files import Adapters, fingerprint, write_adapters
from relax_server.models.catalog import SMOLLM2, resolve_model
from relax_server.models.tokenizer import byte_tokenizer
from relax_server.models.weight_files import FolderWeights, read_weights

from benchmarks.report import save
from relax_sdk.config import EngineKind, SamplingParams, WeightsWay

QWEN3_600M = "qwen3-600m"
MODELS = {"relax/tiny-omni": "float32", SMOLLM2: "bfloat16", QWEN3_600M: "bfloat16"}
"""And the dtype of each."""
SHARE = 0.02
TOKENS = 2048
"""Tokens of an answer, at most; it is given up once enough was seen."""
LIMIT = 600.0
"""Seconds for a start, a command or an answer."""
BEFORE, AFTER = 16, 8
"""Tokens before an update begins and after it was answered."""
SHARED = Path("/dev/shm")
"""Where the trainer of a run puts weights."""


def large(folder: Path) -> Path:
    """A Qwen3 of about 600M parameters, built on the spot."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=38,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.bfloat16()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def in_shared_memory(model: Path, name: str) -> Iterator[Path]:
    """A copy of a model's folder where updates are read from."""
    folder = Path(tempfile.mkdtemp(prefix="relax-bench-weights-", dir=SHARED if SHARED.is_dir() else None))
    try:
        print(f"{name}: copying its weights to {folder} …", flush=True)
        shutil.copytree(model, folder, dirs_exist_ok=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


Update = Callable[[int], Awaitable[None]]
"""Has an engine take the weights of a version."""


def by_folder(engine: HttpEngine, weights: Path) -> Update:
    """The way of weights that the engine reads from a folder."""

    async def send(version: int) -> None:
        await engine.update_weights(str(weights), version)

    return send


async def measure(engine: HttpEngine, send: Update, version: int) -> dict[str, float]:
    """One update while an answer is streamed."""
    arrived: list[float] = []
    updated: tuple[float, float] | None = None

    async def update() -> tuple[float, float]:
        began = time.perf_counter()
        await send(version)
        return began, time.perf_counter()

    sampling = SamplingParams(max_new_tokens=TOKENS, temperature=1.0, ignore_eos=True)
    request = GenerateRequest(input_ids=list(range(40, 60)), sampling=sampling, rid=f"v{version}")
    stream: Any = engine.stream(request, LIMIT)  # a generator, which can be closed
    task: asyncio.Task[tuple[float, float]] | None = None
    async with contextlib.aclosing(stream) as parts:
        async for _ in parts:
            arrived.append(time.perf_counter())
            if task is None and len(arrived) == BEFORE:
                task = asyncio.create_task(update())
            if task is not None and task.done() and updated is None:
                updated = task.result()
            if updated is not None and len([at for at in arrived if at > updated[1]]) >= AFTER:
                break
    if updated is None:
        raise RuntimeError("the answer ended before the weights were loaded")
    gaps = [(after - before, after) for before, after in itertools.pairwise(arrived)]
    usual = statistics.median(gap for gap, at in gaps if at < updated[0])
    paused = max(gap for gap, at in gaps if at >= updated[0]) - usual
    return {"update, s": updated[1] - updated[0], "paused, s": max(paused, 0.0), "a token, s": usual}


async def updates(
    kind: EngineKind, name: str, model: Path, weights: Path, times: int, way: WeightsWay = "folder", **settings: Any
) -> dict[str, float]:
    """One engine with one model, medians."""
    process = process_of(kind, model, weights / f"{kind}.log", EngineSettings(dtype=MODELS[name], **settings))
    print(f"{name}: starting {kind} …", flush=True)
    await process.start(LIMIT)
    engine = connect(EngineAddress(process.url, kind, process.token), model, model)
    group: WeightGroup | None = None

    async def by_broadcast(version: int) -> None:
        assert group is not None
        await group.update(await asyncio.to_thread(read_weights, weights), version)

    try:
        if way == "broadcast":
            assert isinstance(engine, SglangEngine)
            group = WeightGroup(engine)
            await group.open()
        send = by_folder(engine, weights) if group is None else by_broadcast
        await measure(engine, send, 1)  # the pages of the file are mapped for the first time
        seen = []
        for repetition in range(times):
            seen.append(await measure(engine, send, 2 + repetition))
            print(f"{name}, {kind}, repetition {repetition + 1} of {times}: {seen[-1]}", flush=True)
    finally:
        if group is not None:
            await group.close()
        await engine.close()
        await process.stop()
    return {figure: statistics.median(run[figure] for run in seen) for figure in seen[0]}


def whole_size(model: Path) -> int:
    """Bytes of all weights of a model."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def write_random_adapters(model: Path, folder: Path, rank: int, dtype: str) -> None:
    """Adapters on every projection of the decoder, of the sizes that a run with `lora.rank` publishes; B is not zero."""
    import torch

    shapes = FolderWeights(model).shapes
    words = tuple(f".{word}_proj.weight" for word in ("q", "k", "v", "o", "gate", "up", "down"))
    towers = ("visual.", "audio_tower.")
    layers = [name for name in shapes if name.endswith(words) and not name.startswith(towers)]
    made = lambda *shape: 0.01 * torch.randn(*shape, dtype=getattr(torch, dtype))
    pairs = {name.removesuffix(".weight"): (made(rank, shapes[name][1]), made(shapes[name][0], rank)) for name in layers}
    write_adapters(Adapters(pairs, {}, 32 / rank, fingerprint(model)), folder)


def row(kind: EngineKind, name: str, model: Path, weights: Path, times: int, **settings: Any) -> dict[str, Any]:
    """One row of the table."""
    size = sum(file.stat().st_size for file in weights.glob("*.safetensors")) / 1e6
    middle = asyncio.run(updates(kind, name, model, weights, times, **settings))
    middle = {"times fewer": whole_size(model) / 1e6 / size, **middle}
    derived = {"MB/s": size / middle["update, s"], "a step takes at least, s": middle["paused, s"] / SHARE}
    return {"model": name, "engine": kind, "what": "all weights", "file MB": size} | middle | derived


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--rank", type=int, nargs="*", default=[16], help="of adapters, which embedded engines are sent too")
    parser.add_argument("--sglang", type=Path, help="python of an environment with SGLang 0.5.23: make .venv-sglang")
    parser.add_argument("--name", default="weights", help="of the file of results")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.models:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            model = large(folder / "model") if name == QWEN3_600M else resolve_model(name)
            with in_shared_memory(model, name) as weights:
                rows.append(row("embedded", name, model, weights, args.times))
                for rank in args.rank:
                    adapters = weights / f"rank{rank}"
                    write_random_adapters(model, adapters, rank, MODELS[name])
                    rows.append(row("embedded", name, model, adapters, args.times) | {"what": f"adapters, rank {rank}"})
                if args.sglang is not None:
                    more = {"python": args.sglang, "flags": ["--context-length", "4096"]}
                    rows.append(row("sglang", name, model, weights, args.times, **more))
                    sent = row("sglang", name, model, weights, args.times, way="broadcast", **more)
                    rows.append(sent | {"what": "all weights, broadcast"})
        bars = {"share of a step": SHARE, "adapters, times fewer bytes": 20}
        save(args.name, rows, bars=bars, times=args.times)


if __name__ == "__main__":
    main()

"""Tokens a second of the embedded engine, beside real SGLang on the same machine in the same run.

    python -m benchmarks.engines [--sglang .venv-sglang/bin/python] [--models relax/smollm2-135m relax/tiny-omni] [--times 5]

Closed loop: so many requests are always under way, each 32 new tokens with logprobs, sampled at temperature 1, no end-of-turn
token heeded, different prompts. Both engines are up with one thread each and take turns, so that what else the machine does
falls on both; figures are medians of tokens a second. Each is measured without sampling seeds and with one for each request,
as runs send them. Without `--sglang` (`make .venv-sglang` builds its environment) only ours is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from relax_server.engines.process import EngineProcess, ServerProcess
from relax_server.engines.settings import EngineSettings
from relax_server.engines.sglang.process import SglangProcess
from relax_server.models.catalog import SMOLLM2, resolve_model
from relax_server.models.processor import Processor

from benchmarks.report import save

TOKENS, CONCURRENT = 32, (1, 8, 32)
LEAST = 4
"""Requests in a measurement, at least."""
DTYPES = {SMOLLM2: "bfloat16"}
LIMIT = 300.0
"""Seconds for a start or a request."""


async def measure(engine: ServerProcess, prompts: list[list[int]], concurrent: int, seeds: bool = False) -> tuple[float, float]:
    """Tokens and requests a second; with `seeds`, each request has a sampling seed of its own."""
    n, gate = max(concurrent, LEAST), asyncio.Semaphore(concurrent)
    sampling = {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}
    key = {"Authorization": f"Bearer {engine.token}"}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT), headers=key) as session:

        async def one(number: int, ids: list[int]) -> int:
            more = {"sampling_seed": number} if seeds else {}
            body = {"input_ids": ids, "sampling_params": sampling | more, "return_logprob": True}
            async with gate, session.post(f"{engine.url}/generate", json=body) as answer:
                answer.raise_for_status()
                meta = (await answer.json())["meta_info"]
            if len(meta["output_token_logprobs"]) != TOKENS:
                raise RuntimeError(f"{engine.url}: {len(meta['output_token_logprobs'])} logprobs for {TOKENS} tokens")
            return meta["completion_tokens"]

        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*(one(number, ids) for number, ids in enumerate(prompts[:n]))))
    seconds = time.perf_counter() - began
    return tokens / seconds, n / seconds


async def compare(model: str, sglang: Path | None, times: int, folder: Path) -> list[dict[str, Any]]:
    """All engines with one model, taking turns."""
    path = resolve_model(model)
    processor = Processor.load(path)
    ours = EngineProcess(path, folder / "embedded.log", EngineSettings(dtype=DTYPES.get(model, "float32")))
    print(f"{model}: starting the engines …", flush=True)
    await ours.start()
    engines: dict[str, ServerProcess] = {"embedded": ours}
    other: SglangProcess | None = None
    try:
        if sglang is not None:
            other = SglangProcess(
                path,
                folder / "sglang.log",
                EngineSettings(
                    python=sglang,
                    dtype=DTYPES.get(model, "float32"),
                    max_running=max(CONCURRENT),
                    flags=(
                        "--context-length",
                        "2048",
                    ),
                ),
            )
            await other.start(LIMIT)
            engines["SGLang 0.5.23"] = other
        numbers = itertools.count()

        def prompts() -> list[list[int]]:
            texts = (f"Write a short story number {next(numbers)} about a robot." for _ in range(max(CONCURRENT)))
            return [processor.tokenizer.encode(text, add_special_tokens=False) for text in texts]

        seen: dict[tuple[str, int, bool], list[tuple[float, float]]] = {}
        for engine in engines.values():
            await measure(engine, prompts(), 8)
        for repetition in range(times):
            for concurrent, (name, engine), seeds in itertools.product(CONCURRENT, engines.items(), (False, True)):
                seen.setdefault((name, concurrent, seeds), []).append(await measure(engine, prompts(), concurrent, seeds))
            print(f"{model}: repetition {repetition + 1} of {times} done", flush=True)
    finally:
        await ours.stop()
        if other is not None:
            await other.stop()
    rows = []
    for concurrent in CONCURRENT:
        for name in engines:
            plain = seen[name, concurrent, False]
            tokens, requests = (statistics.median(values) for values in zip(*plain, strict=True))
            own, seeded = (
                statistics.median(tokens for tokens, _ in seen[key])
                for key in (("embedded", concurrent, False), (name, concurrent, True))
            )
            spread = [f"{pick(t for t, _ in plain):.0f}" for pick in (min, max)]
            row = {"model": model, "engine": name, "concurrent": concurrent, "tokens/s": tokens, "range": " … ".join(spread)}
            rows.append(row | {"requests/s": requests, "with seeds, tokens/s": seeded, "embedded / it": own / tokens})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang", type=Path, help="python of an environment with SGLang 0.5.23")
    parser.add_argument("--models", nargs="+", default=[SMOLLM2, "relax/tiny-omni"])
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            rows += asyncio.run(compare(model, args.sglang, args.times, Path(folder)))
        save("engines", rows, bars={"embedded / SGLang": 1.0})


if __name__ == "__main__":
    main()

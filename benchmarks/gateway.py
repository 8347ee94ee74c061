"""What recording a model call costs: the rollout service between agents and an engine that answers at once.

    python -m benchmarks.gateway [--calls 2000] [--times 3]

The engine is a fake one, an aiohttp server that answers SGLang's `/generate` without a model (`fake_engine`), so that all
that is measured is HTTP, rendering, recording and events. Direct: the client calls it itself, with token ids. Through the
service: the OpenAI chat route of sessions, a session for each caller, every call a new question. CPU is of the service's
process alone; *added* is the difference of the medians. The client is aiohttp, on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.report import save

CONCURRENT = (1, 16, 64, 256)
LIMIT = 120.0
"""Seconds for a start, or for a measurement's slowest call."""

Call = Callable[[int, int], Awaitable[None]]
"""Makes one call, given the caller's number and the call's."""


@contextlib.contextmanager
def process(*arguments: str, ready: str, log: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A Python process, its URL and itself, once it has said `ready` and the URL."""
    with log.open("wb") as file:
        started = subprocess.Popen([sys.executable, "-m", *arguments], stdout=file, stderr=file)
    try:
        end = time.monotonic() + LIMIT
        while ready not in log.read_text(errors="replace"):
            if started.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{arguments[0]} did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)
        yield log.read_text().split(ready)[1].split()[0], psutil.Process(started.pid)
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait(LIMIT)


async def measure(call: Call, concurrent: int, calls: int) -> tuple[float, list[float]]:
    """Calls a second, and the seconds that each took."""
    each, seconds = max(1, calls // concurrent), list[float]()

    async def caller(number: int) -> None:
        for i in range(each):
            began = time.perf_counter()
            await call(number, i)
            seconds.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(caller(n) for n in range(concurrent)))
    return len(seconds) / (time.perf_counter() - began), seconds


@contextlib.asynccontextmanager
async def direct(http: aiohttp.ClientSession, engine: str) -> AsyncIterator[Call]:
    """Calls of the engine itself."""

    async def call(number: int, i: int) -> None:
        body = {"input_ids": list(range(20, 60)), "sampling_params": {"max_new_tokens": 8}, "return_logprob": True}
        async with http.post(f"{engine}/generate", json=body) as answer:
            answer.raise_for_status()
            await answer.read()

    yield call


@contextlib.asynccontextmanager
async def through(http: aiohttp.ClientSession, service: str, concurrent: int) -> AsyncIterator[Call]:
    """Calls of sessions, one for each caller."""
    opened = []
    for _ in range(concurrent):
        body = {"limits": {"max_turns": 100_000}, "sampling": {"max_new_tokens": 8}}
        async with http.post(f"{service}/v1/sessions", json=body) as answer:
            answer.raise_for_status()
            opened.append(await answer.json())

    async def call(number: int, i: int) -> None:
        body = {"model": "policy", "messages": [{"role": "user", "content": f"what is {i} plus {number}?"}]}
        async with http.post(f"{opened[number]['base_url']}/chat/completions", json=body) as answer:
            answer.raise_for_status()
            await answer.read()

    yield call
    for session in opened:
        async with http.post(f"{service}/v1/sessions/{session['id']}/finish") as answer:
            answer.raise_for_status()


async def once(engine: str, service: str, server: psutil.Process, concurrent: int, calls: int) -> dict[str, float]:
    """Both ways with so many callers."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(LIMIT)) as http:
        async with direct(http, engine) as call:
            await measure(call, concurrent, concurrent)
            rate, plain = await measure(call, concurrent, calls)
        async with through(http, service, concurrent) as call:
            await measure(call, concurrent, concurrent)
            before = sum(server.cpu_times()[:2])
            recorded, seconds = await measure(call, concurrent, calls)
            cpu = sum(server.cpu_times()[:2]) - before
    cut = statistics.quantiles
    return {
        "direct calls/s": rate,
        "recorded calls/s": recorded,
        "CPU ms per call": 1e3 * cpu / len(seconds),
        "p50 ms": 1e3 * statistics.median(seconds),
        "p99 ms": 1e3 * cut(seconds, n=100)[98],
        "added p50 ms": 1e3 * (statistics.median(seconds) - statistics.median(plain)),
        "added p99 ms": 1e3 * (cut(seconds, n=100)[98] - cut(plain, n=100)[98]),
        "RSS MB": server.memory_info().rss / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        with process("benchmarks.fake_engine", ready="engine at ", log=root / "engine.log") as (engine, _):
            serve = ("relax_sdk.cli", "serve", "--port", "0", "--folder", str(root / "service"), "--engine", engine)
            with process(*serve, ready="ready at ", log=root / "serve.log") as (service, server):
                seen: dict[int, list[dict[str, float]]] = {}
                for time_ in range(args.times):
                    for concurrent in CONCURRENT:
                        seen.setdefault(concurrent, []).append(
                            asyncio.run(once(engine, service, server, concurrent, args.calls))
                        )
                    print(f"repetition {time_ + 1} of {args.times} done", flush=True)
    for concurrent, runs in seen.items():
        rows.append({"callers": concurrent} | {name: statistics.median(run[name] for run in runs) for name in runs[0]})
    save("gateway", rows, bars={"CPU ms per call": 0.6})


if __name__ == "__main__":
    main()

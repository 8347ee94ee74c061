"""What recording a model call costs: the rollout service between agents and an engine that answers at once.

    python -m benchmarks.gateway [--calls 2000] [--times 3] [--agentlightning .venv-peers/bin/python] [--workers 2]

The engine is a fake one, an aiohttp server that answers without a model (`fake_engine`), so that all that is measured is
HTTP, rendering, recording and events. Direct: the client calls it itself, with token ids. Through the service: the OpenAI
chat route of sessions, a session for each caller, every call a new question. CPU is of the service's process alone; *added*
is the difference of the medians, above one caller mostly the wait for each other. The client is aiohttp, on the same cores.

With `--workers N` a service of N workers takes turns with one of a single worker. Then each caller has a connection of its own,
as agents in processes of their own have, and client and engine are those of `benchmarks.plain_http`, so that they leave the
cores to the service; *CPU* and memory are of all its processes. The result is `gateway_workers`.

With `--agentlightning` (`make .venv-peers`) the gateway of agentlightning 1.0.2 takes turns with it, between the same client
and the same engine, whose OpenAI route it speaks; a rollout for each caller. It is started as its documentation says, with
default settings and no key. It keeps requests and answers as they are in memory; the service renders the conversation into
tokens, checks and keeps them with their logprobs, writes an event for each call to disk, and makes the trajectory durable
when the session is finished, which is not timed here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.agents import TOKENS, Session, ask, client
from benchmarks.plain_http import Connection
from benchmarks.processes import Server, answers, free_port, module, said, started
from benchmarks.report import save
from benchmarks.service import service

CONCURRENT = (1, 16, 64, 256)
MODEL = "fake"
RELAX, LIGHTNING = "relax", "agentlightning 1.0.2"

Call = Callable[[int, int], Awaitable[None]]
"""Makes one call, given the caller's number and the call's."""
Calls = Callable[[aiohttp.ClientSession, int], AbstractAsyncContextManager[Call]]
"""Calls for so many callers."""


@dataclass(frozen=True)
class Gateway:
    """Something that records model calls."""

    name: str
    server: Server
    direct: Calls
    """The engine itself, as it asks it."""
    through: Calls


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


def question(number: int, i: int) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": f"what is {i} plus {number}?"}]}


def posts(url: str, body: Callable[[int, int], dict[str, Any]]) -> Calls:
    """The same URL for all callers."""

    @contextlib.asynccontextmanager
    async def calls(http: aiohttp.ClientSession, concurrent: int) -> AsyncIterator[Call]:
        async def call(number: int, i: int) -> None:
            await ask(http, "POST", url, body(number, i))

        yield call

    return calls


@contextlib.contextmanager
def relax(engine: str, folder: Path, workers: int = 1, plain: bool = False) -> Iterator[Gateway]:
    """Our service.

    Args:
        engine: URL.
        folder: for its journal, media and log.
        workers: processes that answer requests.
        plain: each caller has a connection of its own, of `benchmarks.plain_http`.
    """

    def tokens(number: int, i: int) -> dict[str, Any]:
        return {"input_ids": list(range(20, 60)), "sampling_params": {"max_new_tokens": TOKENS}, "return_logprob": True}

    with service(engine, folder, workers=workers) as server:

        @contextlib.asynccontextmanager
        async def connections(http: aiohttp.ClientSession, concurrent: int) -> AsyncIterator[Call]:
            made = [await Connection.open(server.url) for _ in range(concurrent)]
            wanted = {"sampling": {"max_new_tokens": TOKENS}, "limits": {"max_turns": 100_000}}
            paths = [f"/v1/sessions/{(await one.post('/v1/sessions', wanted))['id']}" for one in made]

            async def call(number: int, i: int) -> None:
                await made[number].post(f"{paths[number]}/openai/v1/chat/completions", question(number, i))

            yield call
            for one, path in zip(made, paths, strict=True):
                await one.post(f"{path}/finish", {})
                one.transport.close()

        @contextlib.asynccontextmanager
        async def sessions(http: aiohttp.ClientSession, concurrent: int) -> AsyncIterator[Call]:
            opened = [Session(http, server.url) for _ in range(concurrent)]
            for session in opened:
                await session.open(limits={"max_turns": 100_000})

            async def call(number: int, i: int) -> None:
                await ask(http, "POST", f"{opened[number].url}/openai/v1/chat/completions", question(number, i))

            yield call
            for session in opened:
                await session.finish()

        name = RELAX if workers == 1 else f"{RELAX}, {workers} workers"
        yield Gateway(name, server, posts(f"{engine}/generate", tokens), connections if plain else sessions)


@contextlib.contextmanager
def agentlightning(python: Path, engine: str, folder: Path) -> Iterator[Gateway]:
    """The gateway of agentlightning.

    Args:
        python: of an environment that has it.
        engine: URL.
        folder: for its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [str(python.absolute()), "-m", "agentlightning.server", "host=127.0.0.1", f"port={port}"]
    command.append(f"default_proxy.model_name={MODEL}")
    ready = answers(f"http://127.0.0.1:{port}", "/healthz")
    with started(command, ready, folder / "agentlightning.log", cwd=folder, AGL_KEY="") as server:
        asyncio.run(_register(server.url, engine))

        @contextlib.asynccontextmanager
        async def rollouts(http: aiohttp.ClientSession, concurrent: int) -> AsyncIterator[Call]:
            wanted = [{"input": {"number": i}, "is_train": True} for i in range(concurrent)]
            made = await ask(http, "POST", f"{server.url}/api/rollouts", wanted)
            urls = [lightning_url(server.url, rollout["rollout_id"]) for rollout in made]

            async def call(number: int, i: int) -> None:
                await ask(http, "POST", f"{urls[number]}/chat/completions", question(number, i))

            yield call

        yield Gateway(LIGHTNING, server, posts(f"{engine}/v1/chat/completions", question), rollouts)


async def _register(server: str, engine: str) -> None:
    async with client() as http:
        await ask(http, "POST", f"{server}/api/models", [{"model": MODEL, "endpoint": f"{engine}/v1", "version": 0}])


def lightning_url(server: str, rollout: str) -> str:
    """The OpenAI base URL of a rollout of agentlightning."""
    return f"{server}/proxy/rollout/{rollout}/attempt/0/mode/train/openai/v1"


async def once(gateway: Gateway, concurrent: int, calls: int) -> dict[str, float]:
    """Both ways with so many callers."""
    async with client() as http:
        async with gateway.direct(http, concurrent) as call:
            await measure(call, concurrent, concurrent)
            rate, plain = await measure(call, concurrent, calls)
        async with gateway.through(http, concurrent) as call:
            await measure(call, concurrent, concurrent)
            before = gateway.server.cpu
            recorded, seconds = await measure(call, concurrent, calls)
            cpu = gateway.server.cpu - before
    cut = statistics.quantiles
    return {
        "direct calls/s": rate,
        "recorded calls/s": recorded,
        "CPU ms per call": 1e3 * cpu / len(seconds),
        "p50 ms": 1e3 * statistics.median(seconds),
        "p99 ms": 1e3 * cut(seconds, n=100)[98],
        "added p50 ms": 1e3 * (statistics.median(seconds) - statistics.median(plain)),
        "added p99 ms": 1e3 * (cut(seconds, n=100)[98] - cut(plain, n=100)[98]),
        "peak MB": gateway.server.peak,
    }


def table(seen: dict[tuple[int, str], list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Medians, and how many times as fast the service is as each gateway."""
    middle = {key: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for key, runs in seen.items()}
    rows: list[dict[str, Any]] = []
    for (concurrent, name), figures in middle.items():
        own = middle[concurrent, RELAX]
        row: dict[str, Any] = {"callers": concurrent, "gateway": name} | figures
        row["relax: times the calls/s"] = own["recorded calls/s"] / figures["recorded calls/s"]
        row["times one worker"] = figures["recorded calls/s"] / own["recorded calls/s"] if name.startswith(RELAX) else None
        rows.append(row | {"times its CPU": figures["CPU ms per call"] / own["CPU ms per call"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--callers", type=int, nargs="+", default=list(CONCURRENT))
    parser.add_argument("--workers", type=int, nargs="*", default=[], help="of further services, besides that with one")
    parser.add_argument("--agentlightning", type=Path, help="Python of an environment with it: make .venv-peers")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    seen: dict[tuple[int, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        root = Path(temporary)
        plain = bool(args.workers)
        fake = module("benchmarks.plain_http" if plain else "benchmarks.fake_engine")
        engine = stack.enter_context(started(fake, said("engine at "), root / "engine.log")).url
        gateways = [stack.enter_context(relax(engine, root / "service", plain=plain))]
        for workers in args.workers:
            gateways.append(stack.enter_context(relax(engine, root / f"service-{workers}", workers, plain)))
        if args.agentlightning is not None:
            gateways.append(stack.enter_context(agentlightning(args.agentlightning, engine, root / "agentlightning")))
        for repetition in range(args.times):
            for concurrent in args.callers:
                for gateway in gateways:
                    figures = asyncio.run(once(gateway, concurrent, args.calls))
                    seen.setdefault((concurrent, gateway.name), []).append(figures)
            print(f"repetition {repetition + 1} of {args.times} done", flush=True)
    bars = {"CPU ms per call": "0.6", "relax: times the calls/s of agentlightning": "5, with 64 callers"}
    bars |= {"times one worker": "1.6, with two workers"}
    save(
        "gateway_workers" if args.workers else "gateway",
        table(seen),
        bars=bars,
        engine="fake",
        calls=args.calls,
        times=args.times,
    )


if __name__ == "__main__":
    main()

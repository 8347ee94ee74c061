"""Thousands of sessions at once, each step of whose environment waits a second: do they all succeed, and how long is a step?

    python -m benchmarks.sessions [--sessions 4096 2048] [--times 3] [--python .venv-peers/bin/python --openenv 2048]

Two ways. *As they come*: all begin at once, and each is opened, steps once and ends by itself, as in the scaling test that
OpenEnv's documentation describes; those that were opened early have ended when the last one opens. *Held open*: nobody steps
before the last is open, then all do in the same moment, which is the hardest moment there can be. A session of ours is a
WebSocket, its opening, one model call by a fake engine that answers at once, one step of 1 s (`asyncio.sleep`, no thread is
held), and the end, answered when the trajectory is durable; `--http` has requests in place of the socket. OpenEnv
0.10.0 (`make .venv-peers`), with the same wait in `step_async`, has a WebSocket, a reset and the step, and records nothing.
*With a model call* its client makes one too, straight to the fake engine, which OpenEnv leaves to the client.

Client and server share the machine's cores; each measurement has a server of its own. A step's time is the client's, from
sending to answer. Memory is the most that the server's process ever had.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.agents import Session, SocketSession, client
from benchmarks.gyms import NUMBERS, completion, openenv, openenv_ask
from benchmarks.processes import Server, module, said, started
from benchmarks.report import save
from benchmarks.service import service

LIMIT = 240.0
"""Seconds for a measurement; sessions that have not ended by then have failed."""
WAYS = ("as they come", "held open")
CALL = "with a model call"


@dataclass
class Gate:
    """Holds sessions until all are there."""

    waiting_for: int
    """Sessions that are neither there nor have failed."""
    open: asyncio.Event = field(default_factory=asyncio.Event)

    def count(self) -> None:
        """One more is there, or will never be."""
        self.waiting_for -= 1
        if self.waiting_for <= 0:
            self.open.set()


@dataclass
class Seen:
    """What the sessions of one measurement met with."""

    steps: list[float] = field(default_factory=list)
    """Seconds."""
    whole: list[float] = field(default_factory=list)
    """Seconds of sessions, from the first request to the last answer, the wait for others included."""
    failures: Counter[str] = field(default_factory=Counter)
    now: int = 0
    most: int = 0
    """Open at once."""


One = Callable[[aiohttp.ClientSession, Callable[[], Awaitable[None]], Seen], Awaitable[None]]
"""Plays one session; awaits its second argument when it is open, before it steps."""


def ours(server: Server, kind: type[Session]) -> One:
    """A session of the service."""

    async def one(http: aiohttp.ClientSession, opened: Callable[[], Awaitable[None]], seen: Seen) -> None:
        session = kind(http, server.url)
        action = await session.chat(await session.open(env="bench-waits", task_index=next(NUMBERS)))
        await opened()
        began = time.perf_counter()
        outcome = await session.step(action)
        seen.steps.append(time.perf_counter() - began)
        done = await session.finish()
        if not outcome["terminated"] or done["status"] != "completed":
            raise RuntimeError(f"ended as {done['status']}")

    return one


def theirs(server: Server, engine: str | None) -> One:
    """A session of OpenEnv, with a model call by the client if there is an engine."""

    async def one(http: aiohttp.ClientSession, opened: Callable[[], Awaitable[None]], seen: Seen) -> None:
        async with http.ws_connect(f"{server.url}/ws", max_msg_size=0) as socket:
            content, shown = "x", await openenv_ask(socket, "reset")
            if engine is not None:
                question = {"role": "user", "content": shown["observation"]["text"]}
                content = await completion(http, f"{engine}/v1", [question])
            await opened()
            began = time.perf_counter()
            shown = await openenv_ask(socket, "step", content=content)
            seen.steps.append(time.perf_counter() - began)
            if not shown["done"]:
                raise RuntimeError("the episode has not ended")

    return one


async def measure(one: One, server: Server, sessions: int, way: str) -> dict[str, Any]:
    """All sessions, begun at once."""
    seen, gate = Seen(), Gate(sessions)

    async def session(http: aiohttp.ClientSession) -> None:
        there, began = False, time.perf_counter()

        async def opened() -> None:
            nonlocal there
            there = True
            seen.now += 1
            seen.most = max(seen.most, seen.now)
            gate.count()
            if way == WAYS[1]:
                await gate.open.wait()

        try:
            async with asyncio.timeout(LIMIT):
                await one(http, opened, seen)
            seen.whole.append(time.perf_counter() - began)
        except Exception as error:
            seen.failures[f"{type(error).__name__}: {error}"[:100]] += 1
        finally:
            if there:
                seen.now -= 1
            else:
                gate.count()

    cpu, began = server.cpu, time.perf_counter()
    async with client() as http:
        await asyncio.gather(*(session(http) for _ in range(sessions)))
    wall = time.perf_counter() - began
    for failure, n in seen.failures.most_common(5):
        print(f"{n} sessions failed: {failure}", flush=True)
    return figures(seen, sessions, wall, server) | {"server CPU ms": 1e3 * (server.cpu - cpu) / sessions}


def figures(seen: Seen, sessions: int, wall: float, server: Server) -> dict[str, Any]:
    """What is reported of one measurement."""

    def share(values: list[float], percent: int) -> float:
        return statistics.quantiles(values, n=100)[percent - 1] if len(values) > 1 else float("nan")

    return {
        "succeeded": len(seen.whole) / sessions,
        "at once": seen.most,
        "step p50, s": share(seen.steps, 50),
        "step p99, s": share(seen.steps, 99),
        "session p99, s": share(seen.whole, 99),
        "sessions/s": len(seen.whole) / wall,
        "server MB": server.peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[4096, 2048])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--http", action="store_true", help="ours by requests too")
    parser.add_argument("--python", type=Path, help="of an environment with OpenEnv: make .venv-peers")
    parser.add_argument("--openenv", type=int, default=2048, help="sessions of OpenEnv")
    args = parser.parse_args()
    kinds: list[tuple[str, int, type[Session] | None]] = [("relax, socket", n, SocketSession) for n in args.sessions]
    if args.http:
        kinds += [("relax, HTTP", n, Session) for n in args.sessions]
    if args.python is not None:
        kinds += [(name, args.openenv, None) for name in ("OpenEnv 0.10.0", f"OpenEnv 0.10.0, {CALL}")]
    seen: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        with started(module("benchmarks.fake_engine"), said("engine at "), root / "engine.log") as engine:
            for repetition in range(args.times):
                for way in WAYS:
                    for name, sessions, kind in kinds:
                        with contextlib.ExitStack() as stack:
                            if kind is not None:
                                folder = root / f"{name}-{sessions}-{way}-{repetition}"
                                server = stack.enter_context(service(engine.url, folder))
                                one = ours(server, kind)
                            else:
                                assert args.python is not None
                                server = stack.enter_context(openenv(args.python, root, "wait", 1, sessions))
                                one = theirs(server, engine.url if CALL in name else None)
                            found = asyncio.run(measure(one, server, sessions, way))
                        seen.setdefault((way, name, sessions), []).append(found)
                        print(f"repetition {repetition + 1}, {name}, {sessions}, {way}: {found}", flush=True)
    rows = [
        {"way": way, "system": name, "sessions": sessions}
        | {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]}
        for (way, name, sessions), runs in seen.items()
    ]
    bars = {"succeeded": 0.95, "step p99, s": 2.0, "server MB": 2048}
    save("sessions", rows, bars=bars, engine="fake", times=args.times)


if __name__ == "__main__":
    main()

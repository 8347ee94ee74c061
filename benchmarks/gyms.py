"""Episodes a second beside other gyms, and bare steps of environments, all between the same client and fake endpoint.

    make .venv-peers
    python -m benchmarks.gyms --python .venv-peers/bin/python [--episodes 1024] [--steps 10240] [--times 3]

Every system plays the same echo environment of one turn and of five, 64 episodes at once; a turn is one model call and one
step. The endpoint is a fake one that answers at once with eight tokens (`fake_engine`). They take turns in one run. All
share the machine's cores with the client and the endpoint; CPU is of the system's server process, and of the client where the
agent's loop is outside of it; the endpoint's is left out.

| system | who plays | kept of a model call |
|---|---|---|
| relax, rollouts | the service, after one `POST /v1/rollouts` | tokens and logprobs, durable before an episode counts as over |
| relax, HTTP | the client, a request for opening, each model call, each step, the end | the same |
| relax, socket | the client, all but the opening over a WebSocket | the same |
| verifiers 0.4.0 | its own process, by an in-process harness and its interception server | messages, in its traces on disk |
| OpenEnv 0.10.0 | the client; a WebSocket for the environment, model calls go straight to the endpoint | nothing |
| agentlightning 1.0.2 | the client, which has the environment too; model calls through its gateway | bodies, in memory |

What is not the same: OpenEnv records no model calls here, so its episodes leave out what the others are there for;
agentlightning has no environments, so that its steps are function calls in the client. Neither writes anything to disk.
verifiers tells its times itself, from the 64th episode that was scored to the last, its start left out, and its process
holds the agents' loops. *ours / it* compares it with the row of ours that plays in the same place.

The second table is steps alone, of sessions that are open already, over WebSockets, as many at once as are named: OpenEnv's
`/ws` and our `/v1/sessions/{id}/ws`. Alike: JSON in and out, one process, the same uvicorn, environments that are plain
functions (each called in a thread) or coroutines. Not alike: ours checks and keeps the observation as part of a recorded
episode and writes an event for each step to disk, and wants one model call before the first step, which is not timed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.agents import TOKENS, Session, SocketSession, ask, client, exchange, play
from benchmarks.gateway import agentlightning, lightning_url
from benchmarks.processes import Server, answers, end_group, free_port, module, said, started
from benchmarks.report import save
from benchmarks.service import service

CONCURRENT, TURNS = 64, (1, 5)
SESSIONS = (64, 256, 1024)
LEAST = 4
"""Steps of a session, at least."""
PEERS = Path(__file__).parent / "peers"
LIMIT = 600.0
"""Seconds for a measurement."""
NUMBERS = itertools.count()
"""Numbers of tasks: every episode of ours has a question of its own, so that no prompt was rendered before."""


@dataclass(frozen=True)
class Figures:
    """One measurement."""

    episodes: int
    seconds: float
    cpu: float
    """Seconds of processor time of the server, or of all that the system is."""
    client: float | None = None
    """Seconds of processor time of the client that plays, where there is one."""


Measure = Callable[[int, int], Coroutine[Any, Any, Figures]]
"""Plays so many episodes of so many turns."""


@dataclass(frozen=True)
class System:
    """Something that plays episodes."""

    name: str
    beside: str
    """The row of ours that plays in the same place."""
    measure: Measure


@contextlib.contextmanager
def openenv(python: Path, folder: Path, step: str, turns: int, sessions: int) -> Iterator[Server]:
    """OpenEnv's server with an echo environment; see `peers/openenv_echo.py`."""
    port = free_port()
    command = [str(python.absolute()), str(PEERS / "openenv_echo.py"), "--port", str(port), "--step", step]
    command += ["--turns", str(turns), "--sessions", str(sessions)]
    with started(command, answers(f"http://127.0.0.1:{port}", "/health"), folder / f"openenv-{port}.log") as server:
        yield server


async def played(server: Server, one: Callable[[int], Awaitable[None]], episodes: int) -> Figures:
    """Episodes that the client plays, so many at once; a few before, to open connections and fill caches."""

    async def several(numbers: Iterator[int]) -> None:
        for number in numbers:
            await one(number)

    async def all_of(n: int) -> None:
        numbers = iter(range(n))
        await asyncio.gather(*(several(numbers) for _ in range(min(n, CONCURRENT))))

    async with asyncio.timeout(LIMIT):
        await all_of(CONCURRENT)
        cpu, own, began = server.cpu, time.process_time(), time.perf_counter()
        await all_of(episodes)
        seconds = time.perf_counter() - began
        return Figures(episodes, seconds, server.cpu - cpu, time.process_time() - own)


# ------------------------------------------------------------------------------------------------------------- systems


def our_rollouts(server: Server) -> Measure:
    """The service plays by itself."""

    async def submit(http: aiohttp.ClientSession, turns: int, episodes: int) -> None:
        tasks = list(itertools.islice(NUMBERS, episodes))
        body = {"env": f"bench-{turns}", "tasks": tasks, "sampling": {"max_new_tokens": TOKENS}}
        rollout = await ask(http, "POST", f"{server.url}/v1/rollouts", body)
        while rollout["state"] in ("queued", "running"):
            await asyncio.sleep(0.02)
            rollout = await ask(http, "GET", f"{server.url}/v1/rollouts/{rollout['id']}")
        if rollout["counts"]["trajectories"] != episodes:
            raise RuntimeError(f"of {episodes} episodes {rollout['counts']} came back: {rollout['error']}")

    async def measure(turns: int, episodes: int) -> Figures:
        async with asyncio.timeout(LIMIT), client() as http:
            await submit(http, turns, CONCURRENT)
            cpu, began = server.cpu, time.perf_counter()
            await submit(http, turns, episodes)
            return Figures(episodes, time.perf_counter() - began, server.cpu - cpu)

    return measure


def our_sessions(server: Server, kind: type[Session]) -> Measure:
    """The client plays."""

    async def measure(turns: int, episodes: int) -> Figures:
        async with client() as http:
            return await played(server, lambda _: play(kind(http, server.url), f"bench-{turns}", next(NUMBERS)), episodes)

    return measure


def openenv_episodes(servers: dict[int, Server], engine: str) -> Measure:
    """The client plays, a WebSocket for each episode."""

    async def episode(http: aiohttp.ClientSession, url: str) -> None:
        async with http.ws_connect(f"{url}/ws", max_msg_size=0) as socket:
            shown = await openenv_ask(socket, "reset")
            messages = [{"role": "user", "content": shown["observation"]["text"]}]
            while not shown["done"]:
                content = await completion(http, f"{engine}/v1", messages)
                shown = await openenv_ask(socket, "step", content=content)
                messages += [{"role": "assistant", "content": content}]
                messages += [{"role": "user", "content": shown["observation"]["text"]}]

    async def measure(turns: int, episodes: int) -> Figures:
        async with client() as http:
            return await played(servers[turns], lambda number: episode(http, servers[turns].url), episodes)

    return measure


async def openenv_ask(socket: aiohttp.ClientWebSocketResponse, kind: str, **data: Any) -> dict[str, Any]:
    """One message to OpenEnv and the observation that answers it."""
    answer = await exchange(socket, {"type": kind, "data": data})
    if answer["type"] == "error":
        raise RuntimeError(f"OpenEnv: {answer}")
    return answer["data"]


async def completion(http: aiohttp.ClientSession, base: str, messages: list[dict[str, Any]]) -> str:
    """The text of one model call."""
    answer = await ask(http, "POST", f"{base}/chat/completions", {"model": "fake", "messages": messages})
    return answer["choices"][0]["message"]["content"]


def lightning_episodes(server: Server) -> Measure:
    """The client plays and has the environment, as an agent of agentlightning does; it tells the reward and the end."""

    async def episode(http: aiohttp.ClientSession, number: int, turns: int) -> None:
        rollouts = f"{server.url}/api/rollouts"
        id = (await ask(http, "POST", rollouts, [{"input": {"number": number}, "is_train": True}]))[0]["rollout_id"]
        await ask(http, "PATCH", f"{rollouts}/{id}", {"status": {"state": "running"}})
        messages, reward = [{"role": "user", "content": f"question {number}: which letter?"}], 0.0
        for turn in range(1, turns + 1):
            content = await completion(http, lightning_url(server.url, id), messages)
            reward += float(content == "A")
            messages += [{"role": "assistant", "content": content}]
            messages += [{"role": "user", "content": f"wrong, try again ({turn})"}]
        event = {"event_type": "reward", "data": {"value": reward}}
        await ask(http, "POST", f"{rollouts}/{id}/attempt/0/events", event)
        await ask(http, "PATCH", f"{rollouts}/{id}", {"status": {"state": "succeeded"}})

    async def measure(turns: int, episodes: int) -> Figures:
        async with client() as http:
            return await played(server, lambda number: episode(http, number, turns), episodes)

    return measure


def verifiers_episodes(python: Path, engine: str, folder: Path) -> Measure:
    """A process of its own plays; see `peers/verifiers_episodes.py`."""

    def run(turns: int, episodes: int) -> Figures:
        own = python.absolute().parents[1] / "verifiers" / "bin"  # it wants another mcp than OpenEnv
        command = [str(own / "python"), str(PEERS / "verifiers_episodes.py"), "--url", f"{engine}/v1"]
        command += ["--turns", str(turns), "--episodes", str(episodes + CONCURRENT), "--concurrent", str(CONCURRENT)]
        more = {"PATH": f"{own}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}  # it looks for uv on the path
        log = folder / "verifiers.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=file, cwd=folder, env=os.environ | more, start_new_session=True
            )
            try:
                out, _ = process.communicate(timeout=LIMIT)
            finally:
                end_group(process)
        if process.returncode:
            raise RuntimeError(f"verifiers: {log.read_text(errors='replace')[-3000:]}")
        seen = json.loads(out.splitlines()[-1])
        return Figures(seen["episodes"], seen["seconds"], seen["cpu"])

    async def measure(turns: int, episodes: int) -> Figures:
        return await asyncio.to_thread(run, turns, episodes)

    return measure


# --------------------------------------------------------------------------------------------------------------- steps


async def timed_steps(server: Server, steps: list[Callable[[], Awaitable[Any]]], total: int) -> dict[str, float]:
    """Steps of sessions that are open: each session takes its next step as soon as the last one was answered."""
    each, seconds = max(LEAST, total // len(steps)), list[float]()

    async def session(step: Callable[[], Awaitable[Any]], n: int) -> None:
        for _ in range(n):
            began = time.perf_counter()
            await step()
            seconds.append(time.perf_counter() - began)

    await asyncio.gather(*(session(step, 1) for step in steps))
    seconds.clear()
    cpu, own, began = server.cpu, time.process_time(), time.perf_counter()
    await asyncio.gather(*(session(step, each) for step in steps))
    wall, n = time.perf_counter() - began, len(seconds)
    return {
        "steps/s": n / wall,
        "p50 ms": 1e3 * statistics.median(seconds),
        "p99 ms": 1e3 * statistics.quantiles(seconds, n=100)[98],
        "CPU ms per step": 1e3 * (server.cpu - cpu) / n,
        "client's": 1e3 * (time.process_time() - own) / n,
    }


async def our_steps(server: Server, env: str, sessions: int, total: int) -> dict[str, float]:
    """Over our WebSocket."""
    async with asyncio.timeout(LIMIT), client() as http:
        opened = [SocketSession(http, server.url) for _ in range(sessions)]

        async def ready(session: SocketSession) -> Callable[[], Awaitable[Any]]:
            observation = await session.open(env=env, limits={"max_turns": 2})
            await session.chat(observation)
            return lambda: session.step({"content": "x"})

        steps = await asyncio.gather(*(ready(session) for session in opened))
        figures = await timed_steps(server, steps, total)
        await asyncio.gather(*(session.finish() for session in opened))
        return figures


async def openenv_steps(server: Server, sessions: int, total: int) -> dict[str, float]:
    """Over OpenEnv's WebSocket."""
    async with asyncio.timeout(LIMIT), client() as http, contextlib.AsyncExitStack() as stack:

        async def ready() -> Callable[[], Awaitable[Any]]:
            socket = await stack.enter_async_context(http.ws_connect(f"{server.url}/ws", max_msg_size=0))
            await openenv_ask(socket, "reset")
            return lambda: openenv_ask(socket, "step", content="x")

        steps = await asyncio.gather(*(ready() for _ in range(sessions)))
        return await timed_steps(server, steps, total)


# -------------------------------------------------------------------------------------------------------------- tables


def episode_rows(seen: dict[tuple[int, System], list[Figures]]) -> list[dict[str, Any]]:
    """Medians, and ours beside each."""
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for (turns, system), runs in seen.items():
        middle = statistics.median
        n = [run.episodes * turns for run in runs]
        outside = [1e3 * run.client / k for run, k in zip(runs, n, strict=True) if run.client is not None]
        inside = middle(1e3 * run.cpu / k for run, k in zip(runs, n, strict=True))
        rows[turns, system.name] = {
            "turns": turns,
            "system": system.name,
            "episodes/s": middle(run.episodes / run.seconds for run in runs),
            "range": " … ".join(f"{pick(run.episodes / run.seconds for run in runs):.0f}" for pick in (min, max)),
            "CPU ms per turn": inside,
            "client's": middle(outside) if outside else None,
            "beside": system.beside,
        }
    for row in rows.values():
        own = rows[row["turns"], row["beside"]]
        row["ours / it, episodes/s"] = own["episodes/s"] / row["episodes/s"]
        row["it / ours, CPU"] = row["CPU ms per turn"] / own["CPU ms per turn"]
    return list(rows.values())


def step_rows(seen: dict[tuple[str, int, str], list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Medians, and ours beside OpenEnv's."""
    rows = []
    middle = {key: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for key, runs in seen.items()}
    for (kind, sessions, name), figures in middle.items():
        row: dict[str, Any] = {"environment": kind, "sessions": sessions, "system": name} | figures
        own = middle[kind, sessions, "relax"]
        rows.append(row | {"ours / it": own["steps/s"] / figures["steps/s"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="of an environment with the other gyms: make .venv-peers")
    parser.add_argument("--episodes", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10_240)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--only", choices=("episodes", "steps"))
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        root, python = Path(temporary), args.python
        fake = started(module("benchmarks.fake_engine"), said("engine at "), root / "engine.log")
        engine = stack.enter_context(fake).url
        ours = stack.enter_context(service(engine, root / "service"))
        if args.only != "steps":
            servers = {turns: stack.enter_context(openenv(python, root, "plain", turns, 4096)) for turns in TURNS}
            lightning = stack.enter_context(agentlightning(python, engine, root / "agentlightning"))
            systems = (
                System("relax, rollouts", "relax, rollouts", our_rollouts(ours)),
                System("verifiers 0.4.0", "relax, rollouts", verifiers_episodes(python, engine, root)),
                System("relax, HTTP", "relax, HTTP", our_sessions(ours, Session)),
                System("agentlightning 1.0.2", "relax, HTTP", lightning_episodes(lightning.server)),
                System("relax, socket", "relax, socket", our_sessions(ours, SocketSession)),
                System("OpenEnv 0.10.0", "relax, socket", openenv_episodes(servers, engine)),
            )
            episodes: dict[tuple[int, System], list[Figures]] = {}
            for repetition in range(args.times):
                for turns in TURNS:
                    for system in systems:
                        figures = asyncio.run(system.measure(turns, max(CONCURRENT, args.episodes // turns)))
                        episodes.setdefault((turns, system), []).append(figures)
                print(f"episodes, repetition {repetition + 1} of {args.times} done", flush=True)
            more = {"engine": "fake", "episodes": args.episodes, "times": args.times, "at once": CONCURRENT}
            save("gyms", episode_rows(episodes), **more)
        if args.only != "episodes":
            envs = {"in threads": ("bench-steps-threads", "plain"), "async": ("bench-steps-async", "async")}
            peers = {k: stack.enter_context(openenv(python, root, step, 10**9, 4096)) for k, (_, step) in envs.items()}
            steps: dict[tuple[str, int, str], list[dict[str, float]]] = {}
            for repetition in range(args.times):
                for kind, (env, _) in envs.items():
                    for n in SESSIONS:
                        figures = asyncio.run(our_steps(ours, env, n, args.steps))
                        steps.setdefault((kind, n, "relax"), []).append(figures)
                        figures = asyncio.run(openenv_steps(peers[kind], n, args.steps))
                        steps.setdefault((kind, n, "OpenEnv 0.10.0"), []).append(figures)
                print(f"steps, repetition {repetition + 1} of {args.times} done", flush=True)
            save("gym_steps", step_rows(steps), engine="fake", steps=args.steps, times=args.times)


if __name__ == "__main__":
    main()

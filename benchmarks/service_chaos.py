"""SIGKILL of the rollout service under load: is anything lost that was acknowledged, and how long until it is ready again?

    python -m benchmarks.service_chaos [--times 20]

Agents play sessions, rollouts are under way, and several clients follow each of their event streams, while the service is
killed at random moments and started again at once in the same folder. The engine is a fake one that answers after 50 ms
(`fake_engine`). A session counts as *acknowledged* when `finish` was answered, a group when its event arrived. Every session
must be finished or be refused with an error that says why; every stream must hold every group once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
from relax_server.journal import open_journal

import relax_sdk as relax
from benchmarks.processes import module, said, started
from benchmarks.report import save
from relax_sdk.errors import JournalError, ServiceError, ServiceUnavailable

AGENTS, TURNS, FOLLOWERS = 16, 3, 3
GROUPS, SIZE = 200, 4
"""Groups of one rollout, and their size; two rollouts are under way at any time."""
LIMIT = 120.0
"""Seconds for anything."""
SAMPLING = {"max_new_tokens": 8}

T = TypeVar("T")


class Server:
    """`relax serve`, which can be killed and started again at the same address."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.folder, self.engine, self.port = folder, engine, 0
        self.process, self.url = self._start()

    def _start(self) -> tuple[subprocess.Popen[bytes], str]:
        log = self.folder.parent / "serve.log"
        arguments = ["--folder", str(self.folder), "--engine", self.engine, "--port", str(self.port), "--drain-seconds", "0"]
        with log.open("wb") as file:
            command = [sys.executable, "-m", "relax_sdk.cli", "serve", *arguments]
            started = subprocess.Popen(command, stdout=file, stderr=file)
        end = time.monotonic() + LIMIT
        while "ready at " not in (said := log.read_text(errors="replace")):
            if started.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the service did not start: {said[-2000:]}")
            time.sleep(0.01)
        url = said.split("ready at ")[1].split()[0]
        self.port = int(url.rsplit(":", 1)[1])
        while not _ready(url):
            if time.monotonic() > end:
                raise RuntimeError(f"the service was not ready within {LIMIT:.0f} s")
            time.sleep(0.01)
        return started, url

    def kill(self) -> float:
        """Kill it and start it again; returns the seconds until it is ready."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(LIMIT)
        began = time.monotonic()
        self.process, self.url = self._start()
        return time.monotonic() - began

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(LIMIT)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False


class Load:
    """Clients of a service, and what they were told."""

    def __init__(self, url: str) -> None:
        self.client = relax.AsyncClient(url, timeout=30.0)
        self.ending = False
        self.sessions: Counter[str] = Counter()
        """By how they ended: `finished`, `refused` with a clear error, or `unclear`."""
        self.acknowledged: dict[str, float] = {}
        """Trajectories of sessions, and the reward that each was given."""
        self.groups: dict[str, list[str]] = {}
        """Groups that were told, and their trajectories."""
        self.streams: Counter[str] = Counter()
        """`whole` ones, others, and how often one was cut by a kill."""
        self.following = 0
        self._numbers = itertools.count(1)

    async def play(self) -> None:
        """An agent: session after session."""
        while not self.ending:
            try:
                session = await self.client.session(run="chaos", sampling=SAMPLING)
            except ServiceUnavailable:
                await asyncio.sleep(0.1)
                continue
            reward = float(next(self._numbers))
            try:
                for turn in range(TURNS):
                    await session.chat([{"role": "user", "content": f"what is {turn} plus {reward:g}?"}])
                await session.reward(reward)
                self.acknowledged[(await session.finish()).trajectory_id] = reward
                self.sessions["finished"] += 1
            except ServiceError as error:
                self.sessions[await self._fate(session, error)] += 1

    async def _fate(self, session: Any, error: ServiceError) -> str:
        """How a session that broke off ended: what its agent hears when it asks again."""
        if isinstance(error, ServiceUnavailable):
            try:
                await self._patiently(session.cancel)
                return f"unclear: it goes on after {error}"
            except ServiceError as again:
                error = again
        return "refused" if error.code == "session_not_found" and "open a new one" in str(error) else f"unclear: {error}"

    async def roll(self, name: str) -> None:
        """Rollout after rollout, each followed by several clients."""
        for number in itertools.count():
            if self.ending:
                return
            settings: dict[str, Any] = dict(n=GROUPS, group_size=SIZE, sampling=SAMPLING)
            key = f"{name}-{number}"
            rollout = await self._patiently(
                lambda key=key, settings=settings: self.client.rollout("higher-lower-v0", idempotency_key=key, **settings)
            )
            for groups in await asyncio.gather(*(self._follow(rollout) for _ in range(FOLLOWERS))):
                told = [id for id, _ in groups]
                self.streams["whole" if len(told) == len(set(told)) == GROUPS else f"with {len(set(told))} groups"] += 1
                self.streams["told twice"] += len(told) - len(set(told))
                self.groups.update(groups)

    async def _follow(self, rollout: Any) -> list[tuple[str, list[str]]]:
        """The groups of a rollout as one client hears of them."""
        groups: list[tuple[str, list[str]]] = []
        after, over = 0, False
        self.following += 1
        while not over:
            try:
                async for event in rollout.events(after):
                    after, over = event.id, event.kind == "finished"
                    if event.kind == "group":
                        groups.append((event.data["id"], [row["id"] for row in event.data["trajectories"]]))
            except ServiceUnavailable:
                await asyncio.sleep(0.1)
        self.following -= 1
        return groups

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until the service can be reached."""
        async with asyncio.timeout(LIMIT):
            while True:
                try:
                    return await ask()
                except ServiceUnavailable:
                    await asyncio.sleep(0.1)


async def under_load(server: Server, times: int, rng: random.Random) -> tuple[Load, list[float]]:
    """Kill the service so often; returns what its clients were told, and the seconds until it was ready again."""
    load, seconds = Load(server.url), list[float]()
    clients = [asyncio.create_task(load.play()) for _ in range(AGENTS)]
    clients += [asyncio.create_task(load.roll(name)) for name in ("a", "b")]
    for number in range(times):
        await asyncio.sleep(rng.uniform(1.0, 4.0))
        load.streams["cut"] += load.following
        seconds.append(await asyncio.to_thread(server.kill))
        print(f"kill {number + 1} of {times}: ready again after {seconds[-1]:.1f} s", flush=True)
    load.ending = True
    async with asyncio.timeout(2 * LIMIT):
        await asyncio.gather(*clients)
    await load.client.close()
    return load, seconds


def examine(folder: Path, load: Load) -> dict[str, int]:
    """What was acknowledged, against the journal."""
    journal, found = open_journal(folder / "journal.db"), Counter[str]()
    for id, reward in load.acknowledged.items():
        try:
            found["lost"] += journal.trajectory(id).reward != reward
        except JournalError:
            found["lost"] += 1
    runs = {id.partition("/")[0] for id in load.groups}
    rows = [row.id for run in ("chaos", *sorted(runs)) for row in journal.trajectories(run, limit=10_000_000)]
    told = {id for ids in load.groups.values() for id in ids}
    journal.close()
    return {"lost": found["lost"] + len(told - set(rows)), "duplicated": len(rows) - len(set(rows))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        slow = ("benchmarks.fake_engine", "--delay", "0.05")
        with started(module(*slow), said("engine at "), root / "engine.log") as fake:
            server = Server(root / "service", fake.url)
            try:
                load, seconds = asyncio.run(under_load(server, args.times, random.Random(args.seed)))
            finally:
                server.stop()
        end = examine(root / "service", load)
    unclear = {how: number for how, number in load.sessions.items() if how.startswith("unclear")}
    broken = {how: number for how, number in load.streams.items() if how.startswith("with ")}
    row = {
        "kills": len(seconds),
        "seconds until ready, median": statistics.median(seconds),
        "worst": max(seconds),
        "sessions acknowledged": len(load.acknowledged),
        "refused with a clear error": load.sessions["refused"],
        "ended unclearly": sum(unclear.values()),
        "trajectories of rollouts told": sum(map(len, load.groups.values())),
        "acknowledged trajectories lost": end["lost"],
        "duplicated": end["duplicated"],
        "streams cut": load.streams["cut"],
        "streams whole": load.streams["whole"],
        "streams with a hole": sum(broken.values()),
        "groups told twice": load.streams["told twice"],
    }
    for how, number in (unclear | broken).items():
        print(f"{number} × {how}", flush=True)
    save("service_chaos", [row], bars={"seconds until ready": 5, "lost, duplicated, unclear, holes, told twice": 0})


if __name__ == "__main__":
    main()

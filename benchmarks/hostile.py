"""A hostile tenant beside an honest one: what does the honest one notice, and is anything lost?

    python -m benchmarks.hostile [--attacks NAME …] [--seconds 10]

`relax serve` runs with keys and a fake engine that answers at once. An honest tenant plays episodes of one turn all the time,
eight at once; each attack of `benchmarks.attacks` is carried out beside it for some seconds, with a key of its own that may
play and upload, in a process of lowest priority, as an attacker brings processors of its own. Meanwhile `/healthz` is asked
every 50 ms, and the memory of the service and of all that it started is read; what processes share counts once. Uploaded code
stands alone there, as each of its workers has its own limit (`--worker-memory`). *Honest* is the honest tenant's episodes a
second during the attack over those in the seconds before it. Any error at all is a failure of the honest tenant. In the end
every trajectory that was acknowledged is asked for again. *Still open* is what a revoked key still had after five seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.agents import TOKENS
from benchmarks.attacks import ATTACKS
from benchmarks.processes import Server, module, said, started
from benchmarks.report import save
from benchmarks.service import service

PLAYERS = 8
"""Episodes of the honest tenant at once."""
LOOK_SECONDS, MEMORY_SECONDS = 0.05, 0.2
GUARD = "relax_server.api.environments.guard"
"""Module of the processes that guard uploaded code."""
LIMIT, MORE = 30.0, 120.0
"""Seconds for any answer to the honest tenant; seconds that an attack may go on when its time is over."""
HELLO = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}


@dataclass
class Honest:
    """What the honest tenant did and met with."""

    acknowledged: list[str] = field(default_factory=list)
    """Ids of trajectories that `finish` was answered with."""
    failures: Counter[str] = field(default_factory=Counter)


@dataclass
class Watch:
    """What was seen of the service."""

    worst: float = 0.0
    """Seconds of the slowest answer of `/healthz`."""
    memory: float = 0.0
    """MiB at most, of the service and of what decodes for it."""
    uploaded: float = 0.0
    """MiB at most, of uploaded code and what guards it."""

    def reset(self) -> None:
        """Begin again."""
        self.worst = self.memory = self.uploaded = 0.0


async def ask(http: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> Any:
    """One request of the honest tenant.

    Raises:
        RuntimeError: it was refused.
    """
    async with http.request(method, path, json=body) as answer:
        found = await answer.json()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path.split('/')[-1]}: {answer.status} {found}")
        return found


async def play(http: aiohttp.ClientSession, honest: Honest) -> None:
    """Episodes one after the other, for ever."""
    while True:
        try:
            opened = await ask(http, "POST", "/v1/sessions", {"sampling": {"max_new_tokens": TOKENS}})
            path = f"/v1/sessions/{opened['id']}"
            await ask(http, "POST", f"{path}/openai/v1/chat/completions", HELLO)
            await ask(http, "POST", f"{path}/reward", {"value": 1.0})
            honest.acknowledged.append((await ask(http, "POST", f"{path}/finish"))["trajectory_id"])
        except (RuntimeError, TimeoutError, aiohttp.ClientError, OSError) as error:
            honest.failures[f"{type(error).__name__}: {str(error)[:200]}"] += 1
            await asyncio.sleep(0.2)


async def look(http: aiohttp.ClientSession, process: psutil.Process, watch: Watch) -> None:
    """Ask whether it is there, and how much memory it has, for ever."""
    weighed = 0.0
    while True:
        began = time.monotonic()
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with http.get("/healthz") as answer:
                await answer.read()
        watch.worst = max(watch.worst, time.monotonic() - began)
        if began - weighed > MEMORY_SECONDS:
            weighed = began
            own, uploaded = await asyncio.to_thread(memory, process)
            watch.memory, watch.uploaded = max(watch.memory, own), max(watch.uploaded, uploaded)
        await asyncio.sleep(LOOK_SECONDS)


def memory(process: psutil.Process) -> tuple[float, float]:
    """MiB of the service, and of uploaded code; what processes share counts once, in parts."""
    children = process.children(recursive=True)
    guards = [each for each in children if GUARD in _command(each)]
    foreign = {each.pid for guard in guards for each in (guard, *guard.children(recursive=True))}
    used = [0.0, 0.0]
    for each in [process, *children]:
        with contextlib.suppress(psutil.Error):
            used[each.pid in foreign] += each.memory_full_info().pss / 2**20
    return used[0], used[1]


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


async def attack(name: str, url: str, key: str, folder: Path, seconds: float) -> dict[str, int]:
    """One attack in a process of its own; returns how it was answered."""
    arguments = ("--url", url, "--key", key, "--folder", folder, "--seconds", seconds)
    command = ["nice", "-n", "19", *module("benchmarks.attacks", name, *arguments)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        async with asyncio.timeout(seconds + MORE):
            out, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        return {"did not end": 1}
    return json.loads(out.decode().splitlines()[-1]) if process.returncode == 0 else {"failed": 1}


@contextlib.asynccontextmanager
async def caller(url: str, key: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the service with a key."""
    headers, limit = {"Authorization": f"Bearer {key}"} if key else {}, aiohttp.ClientTimeout(LIMIT)
    async with aiohttp.ClientSession(url, headers=headers, timeout=limit) as http:
        yield http


async def measure(server: Server, folder: Path, names: list[str], seconds: float) -> list[dict[str, Any]]:
    """All attacks, one after the other."""
    honest, watch, rows = Honest(), Watch(), []
    own = new_key(folder, "honest")
    keys = {name: new_key(folder, name, "run,upload") for name in names}  # each attack begins with all of its key's quotas
    async with caller(server.url, own) as mine, caller(server.url, "") as anybody:
        tasks = [asyncio.create_task(play(mine, honest)) for _ in range(PLAYERS)]
        tasks.append(asyncio.create_task(look(anybody, psutil.Process(server.pid), watch)))
        await asyncio.sleep(seconds / 2)  # everything has been done once
        for name in names:
            began, n = time.monotonic(), len(honest.acknowledged)
            await asyncio.sleep(seconds)
            before = (len(honest.acknowledged) - n) / (time.monotonic() - began)
            watch.reset()
            failures, began, n = honest.failures.total(), time.monotonic(), len(honest.acknowledged)
            answers = await attack(name, server.url, keys[name], folder, seconds)
            during = (len(honest.acknowledged) - n) / (time.monotonic() - began)
            wrong = sum(count for how, count in answers.items() if how.startswith("5") and how != "503")
            rows.append(
                {
                    "attack": name,
                    "honest": during / before if before else None,
                    "failures": honest.failures.total() - failures,
                    "worst /healthz (s)": watch.worst,
                    "memory (MiB)": watch.memory,
                    "uploaded code (MiB)": watch.uploaded,
                    "5xx but 503": wrong,
                    "still open": answers.pop("still open", 0),
                    "answers": ", ".join(f"{how}: {count}" for how, count in sorted(answers.items())) or "none",
                }
            )
            print(rows[-1], flush=True)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        lost = await missing(mine, honest)
    print(f"{len(honest.acknowledged)} trajectories were acknowledged, {lost} are missing; failures: {dict(honest.failures)}")
    rows.append({"attack": "(missing in the end)", "failures": lost})
    return rows


async def missing(http: aiohttp.ClientSession, honest: Honest) -> int:
    """How many acknowledged trajectories cannot be read."""
    lost = 0
    for id in honest.acknowledged:
        async with http.get(f"/v1/trajectories/{id}") as answer:
            lost += answer.status != 200
    return lost


def new_key(folder: Path, name: str, rights: str = "run") -> str:
    """The secret of a new key that may play, or also upload."""
    command = module("relax_sdk.cli", "keys", "add", name, "--rights", rights, "--episodes", 64, "--folder", folder)
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        root.joinpath("service").mkdir()
        new_key(root / "service", "first")
        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(started(module("benchmarks.fake_engine"), said("engine at "), root / "engine.log"))
            server = stack.enter_context(service(engine.url, root / "service"))
            rows = asyncio.run(measure(server, root / "service", args.attacks, args.seconds))
    bars = {"honest": 0.5, "failures": 0, "worst /healthz (s)": 1.0, "memory (MiB)": 1024, "5xx but 503": 0, "still open": 0}
    save("hostile", rows, key="attack", bars=bars)


if __name__ == "__main__":
    main()

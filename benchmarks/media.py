"""What media cost: a picture of 1 MB and a sound of 30 s in every turn of 64 sessions at once.

    python -m benchmarks.media [--sessions 64] [--times 3]

Episodes have three turns, so the third prompt holds three pictures and three sounds. Cases: the environment shows them, the
same to all sessions (a group's task) or each session its own, and the agent passes references on; the agent uploads each
once and names it; the agent sends the whole history as data URIs with every call, as a plain OpenAI client does. The engine
is a fake one that answers at once; it is told where media lie, as an engine on the same machine can be, or sent their bytes.

Bytes on disk are the service's media folder's, beside those of all different items that were shown. Bytes from and to the
agent are bodies of requests and answers, bytes to the engine what it counted, all per turn. CPU is of the service's process,
decoding and features of each different item included; memory is the most that it ever had, and what was there before and
after.
The client makes its data URIs beforehand; it and the engine share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.agents import TOKENS, ask, client
from benchmarks.envs import picture, sound
from benchmarks.processes import Server, module, said, started
from benchmarks.report import save
from benchmarks.service import service

TURNS = 3
LIMIT = 600.0
"""Seconds for a measurement."""
MB = 1e6


@dataclass(frozen=True)
class Case:
    """How media come into sessions, and go to the engine."""

    name: str
    env: str = "none"
    whole: bool = False
    """The agent sends data URIs; otherwise references."""
    paths: bool = True
    """The engine is told paths."""


CASES = (
    Case("environment, the same to all", "bench-shows-3"),
    Case("environment, the same to all; bytes to the engine", "bench-shows-3", paths=False),
    Case("environment, each its own", "bench-shows-own-3"),
    Case("agent, uploaded once"),
    Case("agent, whole history each time", whole=True),
    Case("agent, whole history each time; bytes to the engine", whole=True, paths=False),
)


class Counting:
    """Requests whose bytes are counted."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http, self.sent, self.received = http, 0, 0

    async def ask(self, url: str, body: Any = None) -> Any:
        """POST, with JSON or bytes in and JSON out.

        Raises:
            RuntimeError: it was refused.
        """
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self.http.post(url, data=data, headers={"Content-Type": "application/json"}) as answer:
            raw = await answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{url}: {answer.status}, {raw[:500].decode(errors='replace')}")
        self.sent += len(data)
        self.received += len(raw)
        return orjson.loads(raw)


def parts(urls: tuple[str, str]) -> list[dict[str, Any]]:
    """The content of a user message."""
    return [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": urls[0]}},
        {"type": "audio_url", "audio_url": {"url": urls[1]}},
    ]


def data_uris(name: str) -> tuple[str, str]:
    """A picture and a sound, whole."""
    image, wave = (base64.b64encode(data).decode() for data in (picture(name), sound(name)))
    return f"data:image/png;base64,{image}", f"data:audio/wav;base64,{wave}"


async def uploaded(http: Counting, service: str, name: str) -> tuple[str, str]:
    """The same, by reference."""
    image = await http.ask(f"{service}/v1/media/image", picture(name))
    wave = await http.ask(f"{service}/v1/media/audio", sound(name))
    return f"relax-media:{image['sha256']}", f"relax-media:{wave['sha256']}"


async def session(http: Counting, service: str, case: Case, number: int, whole: list[tuple[str, str]]) -> None:
    """One session, from opening to a durable trajectory."""
    body = {"env": case.env, "seed": number, "sampling": {"max_new_tokens": TOKENS}}
    opened = await http.ask(f"{service}/v1/sessions", body | {"limits": {"max_tokens": 8192}})
    url, messages = f"{service}/v1/sessions/{opened['id']}", opened["observation"]
    for turn in range(TURNS):
        if case.env == "none":
            urls = whole[turn] if case.whole else await uploaded(http, service, f"{number}/{turn}")
            messages.append({"role": "user", "content": parts(urls)})
        answer = await http.ask(f"{url}/openai/v1/chat/completions", {"model": "policy", "messages": messages})
        messages.append(answer["choices"][0]["message"])
        if case.env != "none":
            messages += (await http.ask(f"{url}/step", {"action": messages[-1]}))["observation"]
    await http.ask(f"{url}/finish")


async def measure(case: Case, server: Server, engine: str, folder: Path, sessions: int) -> dict[str, float]:
    """All sessions at once."""
    own = case.env != "bench-shows-3"
    whole = [[data_uris(f"{n}/{turn}") for turn in range(TURNS)] for n in range(sessions)] if case.whole else [[]] * sessions
    turns, empty = sessions * TURNS, server.rss
    async with asyncio.timeout(LIMIT), client() as http:
        before, counting = await ask(http, "GET", f"{engine}/counts"), Counting(http)
        cpu, began = server.cpu, time.perf_counter()
        await asyncio.gather(*(session(counting, server.url, case, n, whole[n]) for n in range(sessions)))
        wall, cpu = time.perf_counter() - began, server.cpu - cpu
        to_engine = (await ask(http, "GET", f"{engine}/counts"))["bytes"] - before["bytes"]
    different = (sessions if own else 1) * TURNS * (len(picture("0/0")) + len(sound("0/0")))
    return {
        "turns/s": turns / wall,
        "different media, MB": different / MB,
        "on disk, MB": sum(file.stat().st_size for file in (folder / "media").rglob("*") if file.is_file()) / MB,
        "from the agent, MB a turn": counting.sent / turns / MB,
        "to the agent, MB a turn": counting.received / turns / MB,
        "to the engine, MB a turn": to_engine / turns / MB,
        "CPU ms a turn": 1e3 * cpu / turns,
        "server MB before": empty,
        "server MB": server.peak,
        "after": server.rss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args()
    seen: dict[Case, list[dict[str, float]]] = {}
    fake = module("benchmarks.fake_engine", "--model", "relax/tiny-omni")
    for repetition in range(args.times):
        for case in CASES:
            with tempfile.TemporaryDirectory() as temporary:
                root = Path(temporary)
                with (
                    started(fake, said("engine at "), root / "engine.log", OMP_NUM_THREADS="1") as engine,
                    service(engine.url, root / "service", case.paths) as server,
                ):
                    found = asyncio.run(measure(case, server, engine.url, root / "service", args.sessions))
            seen.setdefault(case, []).append(found)
            print(f"repetition {repetition + 1}, {case.name}: {found}", flush=True)
    rows = [
        {"media come from": case.name} | {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for case, runs in seen.items()
    ]
    save("media", rows, engine="fake", sessions=args.sessions, turns=TURNS, times=args.times)


if __name__ == "__main__":
    main()

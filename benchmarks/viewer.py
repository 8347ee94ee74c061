"""How fast does the viewer's server answer, and does its memory stay flat while trajectories arrive?

    python -m benchmarks.viewer [--live-seconds 600]

A run of 10,000 trajectories is opened by a server that has just begun, and trajectories are asked for, caches cold and warm.
Then 50 trajectories a second are committed to a run that a client follows as the page does: it reads the stream of changes and
asks for what is new. The browser's half is `benchmarks/viewer_page.py`.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
from httpx_sse import connect_sse
from relax_server.journal import open_journal

from benchmarks.report import save, table
from relax_sdk.run_lock import Holder, RunLock
from tests.viewer.many_runs import GROUP, MANY, make_many, text_group

RATE = 50
"""Trajectories a second of the live run."""
TOKENS = 400
"""Most tokens of an answer."""
START_LIMIT = 120.0
"""Seconds in which the server must answer."""


@contextmanager
def server(folder: Path) -> Iterator[tuple[httpx.Client, psutil.Process, float]]:
    """A client of `relax view` over a folder, the server's process, and the seconds until it told its address."""
    command = [sys.executable, "-u", "-m", "relax_sdk.cli", "view", str(folder), "--port", "0"]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        started = time.perf_counter() - began
        with httpx.Client(base_url=f"{url}data/", timeout=START_LIMIT) as client:
            client.get("site.json").raise_for_status()
            yield client, psutil.Process(process.pid), started
        process.terminate()


def seconds(client: httpx.Client, path: str, **params: int) -> float:
    """Seconds until a whole answer is here."""
    began = time.perf_counter()
    client.get(path, params=params).raise_for_status()
    return time.perf_counter() - began


def row(what: str, times: list[float]) -> dict[str, Any]:
    return {"what": what, "n": len(times), "median ms": round(1000 * median(times), 1), "worst ms": round(1000 * max(times), 1)}


def answers(folder: Path, repeats: int) -> list[dict[str, Any]]:
    """How long answers take, the first of a server and later ones."""
    starts, first_rows, first_one, rows, ones = (list[float]() for _ in range(5))
    chosen = random.Random(0).sample(range(1, MANY), 20)
    for _ in range(repeats):
        with server(folder) as (client, _, started):
            starts.append(started)
            first_one.append(seconds(client, f"runs/many/trajectories/{MANY // 2}.json"))
        with server(folder) as (client, _, _):
            first_rows.append(seconds(client, "runs/many/trajectories.json"))
            rows += [seconds(client, "runs/many/trajectories.json") for _ in range(3)]
            ones += [seconds(client, f"runs/many/trajectories/{seq}.json") for seq in chosen]
    return [
        row("start of `relax view`", starts),
        row(f"the first answer: {MANY:,} rows", first_rows),
        row("the first answer: a trajectory", first_one),
        row(f"{MANY:,} rows again", rows),
        row("a trajectory again", ones),
    ]


def live(folder: Path, lasting: float) -> dict[str, Any]:
    """A run that grows while a client follows it."""
    growing = make_many(folder, "live", 800, TOKENS)
    journal, number, over = open_journal(growing / "journal.db"), 1000, threading.Event()
    seen = [0]

    def follow(client: httpx.Client) -> None:
        with connect_sse(client, "GET", "runs/live/live") as source:
            for _ in source.iter_sse():
                page = client.get("runs/live/trajectories.json", params={"after": seen[0]}).json()
                seen[0] = page["next"]
                if over.is_set() and seen[0] == 800 + (number - 1000) * GROUP:
                    return

    with server(folder) as (client, process, _), RunLock(growing, Holder.here()):
        thread = threading.Thread(target=follow, args=(client,), daemon=True)
        thread.start()
        memory, began = list[int](), time.monotonic()
        while (passed := time.monotonic() - began) < lasting:
            while (number - 1000) * GROUP < passed * RATE:
                journal.commit(text_group(number, "live", TOKENS), "live")
                number += 1
            if passed > len(memory) * lasting / 20:
                memory.append(process.memory_info().rss >> 20)
            time.sleep(0.02)
        over.set()
        journal.commit(text_group(number, "live", TOKENS), "live")
        number += 1
        thread.join(START_LIMIT)
        told = seen[0] == 800 + (number - 1000) * GROUP
    journal.close()
    return {"seconds": round(lasting), "trajectories": (number - 1000) * GROUP, "all told": told} | {
        "server MiB at a quarter": memory[len(memory) // 4],
        "server MiB at the end": memory[-1],
        "MiB": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--live-seconds", type=float, default=600.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_many(folder, tokens=TOKENS)
        rows, grown = answers(folder, args.repeats), live(folder, args.live_seconds)
    print(table([{name: value for name, value in grown.items() if name != "MiB"}]))
    save("viewer", rows, live=grown)


if __name__ == "__main__":
    main()

"""Workers that are killed again and again while sessions are played: what was told as done is there, and once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from relax_server.journal import open_journal
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from scripted_server import ScriptedServer
from service_process import start

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

KILLS, PLAYERS = 20, 8
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def engine() -> Iterator[str]:
    it = ScriptedServer(Processor.load(resolve_model("relax/tiny-omni")))
    it.start()
    it.repeats("A")
    yield it.url
    it.stop()


def workers(process: int) -> list[psutil.Process]:
    children = psutil.Process(process).children()
    found = []
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            if "relax_server.api.workers.process" in child.cmdline():
                found.append(child)
    return found


async def play(url: str, done: list[str], lost: Counter[str]) -> None:
    """Open, call and finish sessions for ever; notes the trajectories that were told as durable."""
    while True:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            with contextlib.suppress(httpx.TransportError):  # its worker was killed
                while True:
                    opened = await client.post("/v1/sessions", json={"sampling": {"max_new_tokens": 1}})
                    if opened.status_code != 201:
                        lost[f"open: {opened.status_code}"] += 1
                        await asyncio.sleep(0.1)
                        continue
                    session = opened.json()
                    path = f"/v1/sessions/{session['id']}"
                    asked = await client.post(f"{path}/openai/v1/chat/completions", json={"messages": HELLO})
                    ended = await client.post(f"{path}/finish")
                    if ended.status_code == 200 and ended.json()["status"] == "completed":
                        done.append(ended.json()["trajectory_id"])
                    else:
                        lost[f"call: {asked.status_code}, finish: {ended.status_code}"] += 1
                    await asyncio.sleep(0.01)


async def opened_at(client: httpx.AsyncClient) -> str:
    """The worker that opens a session; empty: none does."""
    with contextlib.suppress(httpx.TransportError):
        answer = await client.post("/v1/sessions", json={})
        if answer.status_code == 201:
            return answer.json()["id"].removeprefix("s_").rpartition(".")[0] or "0"
    return ""


async def test_what_was_acknowledged_is_there_once(tmp_path: Path, engine: str) -> None:
    it = start(tmp_path / "service", "--workers", "2", "--engine", engine, "--drain-seconds", "2")
    done, lost, dice = list[str](), Counter[str](), random.Random(3)
    players = [asyncio.create_task(play(it.url, done, lost)) for _ in range(PLAYERS)]
    try:
        async with httpx.AsyncClient(base_url=it.url, timeout=30) as client:
            for _ in range(KILLS):
                before = len(done)
                await asyncio.sleep(dice.uniform(0.2, 1.0))
                dice.choice(workers(it.process.pid)).kill()
                seen = set[str]()
                async with asyncio.timeout(120):
                    while len(seen) < 2 or len(done) < before + 20:
                        seen.add(await opened_at(client))
                        seen.discard("")
                        await asyncio.sleep(0.1)
                        if len(workers(it.process.pid)) < 2:
                            seen.clear()
    finally:
        for player in players:
            player.cancel()
        await asyncio.gather(*players, return_exceptions=True)
        await asyncio.to_thread(it.stop)
    assert it.process.returncode == 0
    assert (it.folder / "serve.log").read_text().count("exit code -9") == KILLS
    assert {status for status in lost if status.startswith("open: 5")} <= {"open: 503"}, lost
    journal = open_journal(it.folder / "journal.db")
    there = Counter(row.id for row in journal.trajectories("sessions", limit=1_000_000))
    journal.close()
    assert len(done) == len(set(done)) > 20 * KILLS
    assert [id for id in done if there[id] != 1] == [] and max(there.values()) == 1

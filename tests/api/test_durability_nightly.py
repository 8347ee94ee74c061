"""A service whose database is stopped, killed or frozen, and whose disk is filled, while sessions are finished.

What was told as done is there once, and what was not can be asked for again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from postgres_server import PostgresServer, program
from relax_server.models.processor import Processor
from relax_server.rollout import commits
from service_inside import InsideService, service_inside

import relax_sdk as relax

pytestmark = pytest.mark.nightly

AT_ONCE = 4
"""Sessions that are finished together."""
STOPS, FREEZES, FULL = 20, 20, 20


@pytest.fixture
def database() -> Iterator[PostgresServer]:
    """A server of this test's own, which it may stop."""
    initdb, server = program("initdb"), program("postgres")
    if initdb is None or server is None:
        pytest.skip("PostgreSQL is not installed on this machine: apt install postgresql")
    it = PostgresServer(initdb, server)
    yield it
    it.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", folder], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"a file system cannot be mounted here ({mount.stderr.strip()}): run this as root")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


async def played(it: InsideService, **more: Any) -> list[dict[str, Any]]:
    """Sessions with one model call each."""
    return [await it.played(**more) for _ in range(AT_ONCE)]


async def finish_all(it: InsideService, sessions: list[dict[str, Any]]) -> list[int]:
    """Finish sessions at once, with their own keys, for which nobody asks the database; the status of each."""

    async def finish(session: dict[str, Any]) -> int:
        own = {"Authorization": f"Bearer {session['key']}"}
        return (await it.http.post(f"/v1/sessions/{session['id']}/finish", headers=own)).status_code

    return list(await asyncio.gather(*map(finish, sessions)))


async def until_done(it: InsideService, sessions: list[dict[str, Any]]) -> None:
    """Repeat `finish` until all are durable."""
    async with asyncio.timeout(120):
        while set(await finish_all(it, sessions)) != {200}:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def all_there(it: InsideService, sessions: list[dict[str, Any]]) -> None:
    """Every session is durable, and nothing is there twice."""
    for session in sessions:
        found = await it.http.get(f"/v1/trajectories/{session['trajectory_id']}")
        assert found.status_code == 200 and len(found.json()["turns"]) == 1
    groups = it.core.journal.groups("sessions", "session-train", limit=10_000)
    assert sorted(group.id for group in groups) == sorted(f"sessions/{session['id']}" for session in sessions)


@pytest.mark.parametrize("how", ["terminate", "kill"])
async def test_a_database_that_is_lost_while_sessions_are_finished(
    processor: Processor, tmp_path: Path, database: PostgresServer, how: str
) -> None:
    async with service_inside(processor, tmp_path, database.make()) as it:
        sessions: list[dict[str, Any]] = []
        refused = 0
        for number in range(STOPS):
            batch = await played(it)
            sessions += batch
            lose = asyncio.get_running_loop().call_later(0.003 * (number % 5), getattr(database.process, how))
            answers = await finish_all(it, batch)
            await asyncio.sleep(max(0.0, lose.when() - asyncio.get_running_loop().time()) + 0.01)
            if how == "terminate":  # which waits for connections to end
                database.process.send_signal(2)
            await asyncio.to_thread(database.process.wait, 60)
            later = await finish_all(it, batch)
            assert set(answers + later) <= {200, 503}
            assert all(new == 200 for old, new in zip(answers, later, strict=True) if old == 200), "what was told stays so"
            refused += later.count(503)
            await asyncio.to_thread(database.start)
            await until_done(it, batch)
        assert refused, "some were asked for while there was no database"
        await all_there(it, sessions)


async def test_a_database_that_is_frozen_while_sessions_are_finished(
    processor: Processor, tmp_path: Path, database: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service gives up waiting, as it does after two minutes otherwise, and finds later on what went through."""
    async with service_inside(processor, tmp_path, database.make()) as it:
        sessions: list[dict[str, Any]] = []
        for _ in range(FREEZES):
            batch = await played(it)
            sessions += batch
            with monkeypatch.context() as patch, database.frozen():
                patch.setattr(commits, "COMMIT_TIMEOUT", 0.5)
                assert set(await finish_all(it, batch)) == {503}
            await until_done(it, batch)
        await all_there(it, sessions)


async def test_a_disk_that_is_full_while_sessions_are_finished(processor: Processor, tmp_path: Path, small_disk: Path) -> None:
    headers, pixels = {"Content-Type": "application/octet-stream"}, np.zeros((32, 32, 3), np.uint8)
    async with service_inside(processor, small_disk, str(small_disk / "journal.db")) as it:
        sessions: list[dict[str, Any]] = []
        refused = 0
        for number in range(FULL):
            batch = await played(it, metadata={"noise": secrets.token_hex(20_000)})
            sessions += batch
            filled = small_disk / "filled"
            with filled.open("wb", buffering=0) as file:
                try:
                    while True:
                        os.write(file.fileno(), bytes(4096))
                except OSError:
                    pass
            answers = await finish_all(it, batch)
            refused += answers.count(503)
            assert set(answers) <= {200, 503}
            picture = relax.Image.from_array(pixels + np.uint8(number)).bytes()
            stored = await it.http.post("/v1/media/image", content=picture, headers=headers)
            assert stored.status_code == 503 and stored.json()["error"]["code"] == "storage_unavailable", stored.text
            filled.unlink()
            await until_done(it, batch)
            assert (await it.http.post("/v1/media/image", content=picture, headers=headers)).status_code == 201
        assert refused, "some were asked for while there was no room"
        await all_there(it, sessions)

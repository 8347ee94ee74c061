"""How a run stands, in a file that is replaced as a whole."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from relax_server.roles import status
from relax_server.roles.placement import Engine, Role
from relax_server.roles.process import RoleProcess
from relax_server.roles.restarts import Restarts
from relax_server.roles.slot import EngineSlot
from relax_server.roles.status import RunStatus, StatusFile, role_statuses

START = RunStatus("starting", "starting engines", 0, 10, (), None, {})


class Process:
    """What a status asks of an engine's process."""

    url, pid, host = "http://127.0.0.1:1", 41, "node7"
    lives = True

    def alive(self) -> bool:
        return self.lives


def test_roles_and_engines_are_told_with_their_restarts(tmp_path: Path) -> None:
    restarts = Restarts("resume")
    restarts.count("policy", "killed")
    restarts.count("engine e1", "killed")
    policy = RoleProcess("policy", tmp_path, lambda message: None)
    ours = EngineSlot("e1", "embedded", cast(Engine, Process()), state="current", since=5.0)
    dead = EngineSlot("e2", "embedded", cast(Engine, Process()), state="current")
    cast(Process, dead.process).lives = False
    away = EngineSlot("e3", "sglang", None, "http://gpu3:8000", state="lost")
    told = role_statuses({"policy": cast(Role, policy)}, [ours, dead, away], restarts)
    assert [(s.name, s.kind, s.state, s.restarts, s.log) for s in told] == [
        ("policy", "policy", "starting", 1, "policy.log"),
        ("engine-e1", "embedded", "current", 1, "engine-e1.log"),
        ("engine-e2", "embedded", "ended", 0, "engine-e2.log"),
        ("engine-e3", "sglang", "lost", 0, None),
    ]
    assert [(s.pid, s.host) for s in told] == [(None, platform.node()), (41, "node7"), (41, "node7"), (None, "gpu3")]
    assert told[1].since == 5.0


async def test_it_is_written_when_something_changes_and_now_and_then(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(status, "WRITE_SECONDS", 0.0)
    now, path, written = [START], tmp_path / "status.json", asyncio.Queue[RunStatus]()
    loop = asyncio.get_running_loop()

    class Told(StatusFile):
        def write(self, status: RunStatus) -> None:
            super().write(status)
            loop.call_soon_threadsafe(written.put_nowait, status)

    async with asyncio.timeout(20):
        keeping = asyncio.create_task(Told(path, lambda: now[0]).keep())
        assert await written.get() == START
        for _ in range(20):
            await asyncio.sleep(0)
        now[0] = replace(START, state="training", step=3)
        assert (await written.get()).step == 3, "what has not changed is not written again"
        row = json.loads(path.read_text())
        assert (row["state"], row["step"], row["steps"]) == ("training", 3, 10) and abs(row["time"] - time.time()) < 60
        monkeypatch.setattr(status, "ALIVE_SECONDS", 0.0)
        assert (await written.get()).step == 3, "its time says that the run lives"
        keeping.cancel()


def test_a_reader_never_sees_half_of_it_and_a_full_disk_ends_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    file = StatusFile(tmp_path / "status.json", lambda: START)
    file.write(START)

    def full(self: Path, text: str) -> int:
        with self.open("w") as out:
            out.write(text[:10])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    file.write(replace(START, step=9))
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 0
    assert os.path.exists(tmp_path / "status.tmp"), "only the file beside it is cut"

"""The engine that a service starts for itself: what happens when it ends, and when it then does not start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from relax_server.api import own_engine
from relax_server.api.engine_roster import EngineAccess
from relax_server.api.own_engine import ENGINE_RESTARTS, OwnEngine
from relax_server.api.settings import ServiceConfig

from relax_sdk.errors import EngineUnavailable


class ScriptedProcess:
    """Ends as soon as it is waited for; each start is at another port, and fails where the script says so.

    Args:
        starts: whether each start works; after the last one all do.
    """

    token = ""

    def __init__(self, *starts: bool) -> None:
        self._starts, self.port = list(starts), 0
        self.stopped = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.port += 1
        if self._starts and not self._starts.pop(0):
            raise EngineUnavailable("no room")

    async def wait(self) -> int:
        return 9

    async def stop(self) -> None:
        self.stopped += 1

    async def log_tail(self) -> str:
        return "end of its log"


async def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: ScriptedProcess) -> tuple[list[str], list[str]]:
    """What was said, and the URLs that the engine moved from and to, until it was given up."""
    said: list[str] = []
    moves: list[str] = []
    for name in ("keep_token", "forget_tokens"):
        monkeypatch.setattr(own_engine, name, lambda *_: None)
    monkeypatch.setattr(own_engine, "say", said.append)
    monkeypatch.setattr(own_engine, "RESTART_PAUSE", 0.0)
    engine = OwnEngine(ServiceConfig(tmp_path))
    monkeypatch.setattr(engine, "_process", process)

    async def moved(url: str, access: EngineAccess) -> None:
        moves.append(f"{url[-1]} to {access.url[-1]}")

    over: list[Any] = []
    async with asyncio.timeout(10):
        await engine.watch(moved, lambda: over.append(True))
    assert over == [True]
    return said, moves


async def test_an_engine_that_does_not_start_again_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = ScriptedProcess(False, False, True)
    said, moves = await watched(tmp_path, monkeypatch, process)
    assert said[1:3] == ["the engine does not start: no room"] * 2 and process.stopped == 2
    assert moves == ["0 to 3", "3 to 4", "4 to 5"]


async def test_one_that_ends_again_and_again_or_never_starts_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for starts in ((), (False,) * ENGINE_RESTARTS):
        said, _ = await watched(tmp_path, monkeypatch, ScriptedProcess(*starts))
        assert said[-1] == "the engine ended or did not start 6 times; giving up. end of its log"

"""How long the controller waits for a role."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from relax_server.roles.controller import Controller
from relax_server.roles.messages import RolloutReport, WarmupMade

from relax_sdk.errors import RunError

SECONDS = 2.0


def waiting() -> Any:
    """A controller with nothing but its inbox."""
    made: Any = object.__new__(Controller)
    made.inbox, made.stats, made.job = asyncio.Queue(), {}, SimpleNamespace(folder=Path("run"))

    async def handle(message: RolloutReport) -> None:
        made.stats = message.values

    made.handle = handle
    return made


@pytest.mark.parametrize("ends", [True, False])
async def test_a_warm_up_may_take_long_as_long_as_its_episodes_end(ends: bool) -> None:
    controller = waiting()

    async def report() -> None:
        for played in range(6):
            controller.inbox.put_nowait(RolloutReport({"warmup": (played if ends else 0, 6)}))
            await asyncio.sleep(SECONDS / 4)
        controller.inbox.put_nowait(WarmupMade(1))

    reporting = asyncio.create_task(report())
    if ends:
        assert await controller.expect(WarmupMade, SECONDS) == WarmupMade(1)
    else:
        with pytest.raises(RunError, match="no WarmupMade within 2 s"):
            await controller.expect(WarmupMade, SECONDS)
    reporting.cancel()

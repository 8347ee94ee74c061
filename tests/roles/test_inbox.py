"""How the controller waits for its roles' messages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from relax_server.roles import inbox as module
from relax_server.roles.inbox import Inbox
from relax_server.roles.main_roles import RoleDied
from relax_server.roles.messages import Died, Failed, RolloutReady, RolloutReport, Saved, WarmupMade, Warn

from relax_sdk.errors import RunError

SECONDS = 2.0


class Waiting:
    """An inbox, and what it does meanwhile."""

    def __init__(self) -> None:
        self.handled: list[Any] = []
        self.looks = 0
        self.looked_often = asyncio.Event()
        self.inbox = Inbox(Path("run/logs"), self.look, self.handle, self.failure)

    def look(self, now: float) -> None:
        self.looks += 1
        if self.looks == 3:
            self.looked_often.set()

    async def handle(self, message: Any) -> None:
        self.handled.append(message)

    async def failure(self, message: Died | Failed) -> RunError:
        return RunError(f"failed: {message}")


def died(role: str) -> Died:
    return Died(role, 1, 1, Path(f"{role}.log"))


@pytest.mark.parametrize("ends", [True, False])
async def test_a_warm_up_may_take_long_as_long_as_its_episodes_end(ends: bool) -> None:
    inbox = Waiting().inbox

    async def report() -> None:
        for played in range(6):
            inbox.put(RolloutReport({"warmup": (played if ends else 0, 6)}))
            await asyncio.sleep(SECONDS / 4)
        inbox.put(WarmupMade(1))

    reporting = asyncio.create_task(report())
    if ends:
        assert await inbox.expect(WarmupMade, SECONDS) == WarmupMade(1)
    else:
        with pytest.raises(RunError, match="no WarmupMade within 2 s"):
            await inbox.expect(WarmupMade, SECONDS)
    reporting.cancel()


async def test_what_else_comes_is_handled_or_kept() -> None:
    waiting = Waiting()
    saved = Saved(3, Path("checkpoint"), last=False)
    for message in (saved, Warn("slow"), RolloutReady(True, False)):
        waiting.inbox.put(message)
    assert await waiting.inbox.expect(RolloutReady) == RolloutReady(True, False)
    assert waiting.handled == [Warn("slow")]
    assert waiting.inbox.rest() == [saved] and waiting.inbox.rest() == []


async def test_a_death_while_the_run_starts_ends_it_and_one_while_a_role_starts_again_is_told() -> None:
    inbox = Waiting().inbox
    inbox.put(died("policy"))
    with pytest.raises(RunError, match="failed: "):
        await inbox.expect(RolloutReady)
    for role in ("policy", "rollout"):
        inbox.put(died(role))
    with pytest.raises(RoleDied, match="rollout"):
        await inbox.expect(RolloutReady, again="rollout")
    assert inbox.rest() == [died("policy")]  # dealt with next
    inbox.put(Failed("no disk", fatal=False))
    with pytest.raises(RunError, match="no disk"):
        await inbox.expect(RolloutReady)


async def test_hangs_are_looked_for_only_while_nothing_is_there_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    waiting = Waiting()
    for text in "abc":
        waiting.inbox.put(Warn(text))
    assert [(await waiting.inbox.next()).text for _ in range(3)] == list("abc")
    assert waiting.looks == 0
    task = asyncio.create_task(waiting.inbox.next())
    await asyncio.wait_for(waiting.looked_often.wait(), 10)  # a role that hangs says nothing
    waiting.inbox.put(died("policy"))
    assert await task == died("policy")

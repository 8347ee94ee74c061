"""What a stop waits for, and what it cuts short."""

from __future__ import annotations

import asyncio

import pytest
from relax_server.roles import stopping
from relax_server.roles.messages import Stop
from relax_server.roles.stopping import Stopping


class FakeRole:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def send(self, message: object) -> None:
        self.told.append(message)

    def kill(self) -> None:
        self.told.append("killed")


@pytest.fixture
def policy() -> FakeRole:
    return FakeRole()


async def under_way(policy: FakeRole) -> tuple[Stopping, asyncio.Task[object]]:
    stop = Stopping(policy, FakeRole())  # type: ignore[arg-type]
    work: asyncio.Task[object] = asyncio.create_task(asyncio.Event().wait())
    stop.watch(work)
    await asyncio.sleep(0)
    return stop, work


async def test_before_the_first_step_there_is_nothing_to_wait_for(policy):
    stop, work = await under_way(policy)
    assert stop.request() == "stopping"
    with pytest.raises(asyncio.CancelledError):
        await work
    assert policy.told == []  # it need not end by itself, and is not started again


async def test_a_trainer_that_trains_is_asked_for_its_checkpoint(policy, monkeypatch):
    monkeypatch.setattr(stopping, "REST_SECONDS", 0.01)
    stop, work = await under_way(policy)
    stop.trains = True
    assert "with a checkpoint" in stop.request()
    await asyncio.sleep(0)
    assert policy.told == [Stop()] and not work.cancelling()
    stop.saved()  # the controller may be waiting for a role that starts, which nobody needs any more
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(work, 10)


async def test_asked_again_it_waits_for_nothing(policy):
    stop, work = await under_way(policy)
    stop.trains = True
    stop.request()
    assert stop.request(at_once=True) == "stopping at once"
    assert policy.told == [Stop(), "killed"] and stop.seconds == 0
    with pytest.raises(asyncio.CancelledError):
        await work


async def test_asked_before_there_is_any_work(policy):
    stop = Stopping(policy, FakeRole())  # type: ignore[arg-type]
    stop.request()
    work = asyncio.create_task(asyncio.Event().wait())
    stop.watch(work)
    with pytest.raises(asyncio.CancelledError):
        await work

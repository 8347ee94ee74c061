"""Which engines a service uses, also after one of them has moved."""

from __future__ import annotations

import asyncio

import pytest
from relax_server.api.engine_roster import EngineAccess, EngineRoster
from relax_server.api.workers.place import WorkerPlace
from relax_server.engines.coalesce import CoalescingEngine
from relax_server.models.processor import Processor
from relax_server.rollout.pool import EnginePool
from scripted_engine import ScriptedEngine

from relax_sdk.errors import EngineUnavailable

ONE, TWO, GONE = EngineAccess("scripted://one"), EngineAccess("scripted://two"), EngineAccess("scripted://gone")


@pytest.fixture
def roster(processor: Processor, monkeypatch: pytest.MonkeyPatch) -> EngineRoster:
    async def connect(self: EngineAccess) -> CoalescingEngine:
        if self == GONE:
            raise EngineUnavailable(f"the engine {self.url} does not answer")
        return CoalescingEngine(ScriptedEngine(processor, url=self.url))

    monkeypatch.setattr(EngineAccess, "connect", connect)
    return EngineRoster(EnginePool(), WorkerPlace())


def urls(roster: EngineRoster) -> set[str]:
    return {engine.url for engine in roster._pool.engines}


async def settled(roster: EngineRoster) -> set[str]:
    """The engines once those that leave have left."""
    await asyncio.gather(*roster._leaving)
    return urls(roster)


async def test_an_engine_that_moves_leaves_the_others_in_use(roster: EngineRoster) -> None:
    await roster.follow([ONE, TWO])
    moved = EngineAccess("scripted://three")
    await roster.replace(ONE.url, moved)
    assert await settled(roster) == {TWO.url, moved.url}


async def test_these_engines_are_used_and_no_others(roster: EngineRoster) -> None:
    await roster.follow([ONE])
    first = roster._pool.engines[0]
    await roster.follow([ONE, TWO])
    assert roster._pool.engines[0] is first, "one that is in use stays as it is"
    await roster.follow([TWO])
    assert await settled(roster) == {TWO.url}
    with pytest.raises(EngineUnavailable):
        await roster.follow([GONE, ONE])
    assert await settled(roster) == {ONE.url}, "what answers is used"

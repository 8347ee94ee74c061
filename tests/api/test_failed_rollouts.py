"""Failed attempts of rollouts that the service plays: kept, counted by cause, and too many end the rollout."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from relax_server.journal.base import TrajectoryQuery
from relax_server.models.processor import Processor
from service_inside import InsideService, service_inside

import relax_sdk as relax
from relax_sdk import registry

FAILED = TrajectoryQuery(split="failed", sort="oldest")


@pytest.fixture
async def inside(processor: Processor, tmp_path: Path) -> AsyncIterator[InsideService]:
    async with service_inside(processor, tmp_path) as it:
        yield it


class Shaky(relax.Env):
    """Task 0 fails the first time, task 1 always, as all above 9 do."""

    blocking = False
    begun = Counter[int]()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        n = options["task"]["n"]
        self.begun[n] += 1
        if n == 1 or n > 9 or (n == 0 and self.begun[n] == 1):
            raise ValueError("boom")
        return "say", {}

    def step(self, action: Any) -> Any:
        return None, 1.0, True, False, {}


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    Shaky.begun = Counter()
    relax.register("shaky-v0", Shaky, tasks=[{"n": n} for n in range(100)])
    yield
    registry._specs.pop("shaky-v0", None)


async def ended(inside: InsideService, **body: Any) -> dict[str, Any]:
    """A rollout that is over."""
    rollout = (await inside.http.post("/v1/rollouts", json={"env": "shaky-v0"} | body)).json()
    async with asyncio.timeout(60):
        while rollout["ended_at"] is None:
            await asyncio.sleep(0.02)
            rollout = (await inside.http.get(f"/v1/rollouts/{rollout['id']}")).json()
    return rollout


async def test_failed_attempts_are_kept_and_told_by_cause(inside: InsideService) -> None:
    rollout = await ended(inside, n=3)
    assert rollout["counts"] == {"groups": 3, "done": 3, "unusable": 1, "failed": 3, "trajectories": 2}
    kept = inside.core.journal.find(rollout["id"], FAILED)
    assert sorted((row.task_index, row.attempts) for row in kept) == [(0, 1), (1, 1), (1, 2)]
    assert {row.error.rpartition("raised ")[2].partition(":")[0] for row in kept if row.error} == {"ValueError"}
    events = await inside.core.events.after(f"rollout/{rollout['id']}", 0)
    told = {event.data["task_index"]: event.data["failures"] for event in events if event.kind == "group"}
    assert told == {0: {"EnvError": 1}, 1: {"EnvError": 2}, 2: {}}
    shown = (await inside.http.get(f"/v1/trajectories/{kept[0].id}")).json()
    assert shown["status"] == "failed" and "boom" in shown["error"]
    assert inside.core.journal.splits(rollout["id"]) == {"train": 2, "failed": 3}


async def test_a_rollout_of_which_all_fails_ends_with_the_commonest_causes(inside: InsideService) -> None:
    rollout = await ended(inside, tasks=list(range(10, 60)), max_retries=0)
    assert rollout["state"] == "failed" and rollout["counts"]["trajectories"] == 0
    assert "16 groups in a row had no usable episode: 16 × EnvError (ValueError at test_failed_rollouts.py:" in rollout["error"]
    assert "Mend the environment and submit the rest again" in rollout["error"]

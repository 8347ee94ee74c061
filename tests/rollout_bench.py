"""A rollout worker with a scripted engine, a real processor, a real journal and a real media store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from relax_server.journal import open_journal
from relax_server.journal.base import Journal
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from relax_server.rollout import EnginePool, RolloutWorker
from relax_server.rollout.group import GroupResult, GroupTask, play_group
from scripted_engine import Script, ScriptedEngine

from relax_sdk import Env, EnvSpec, MediaStore, RolloutConfig, RunConfig, SamplingParams


@pytest.fixture(scope="session")
def processor() -> Processor:
    return Processor.load(resolve_model("relax/tiny-omni"))


@dataclass
class Bench:
    """A worker and what it stands on."""

    worker: RolloutWorker
    engine: ScriptedEngine
    pool: EnginePool
    journal: Journal
    store: MediaStore

    async def group(self, index: int = 0, row: dict[str, Any] | None = None, **changes: Any) -> GroupResult:
        """Play one group and nothing else."""
        config = self.worker.config
        values: dict[str, Any] = dict(
            id=f"run/train/{index}",
            split="train",
            task_index=index,
            row=row or {"index": index},
            size=config.rollout.group_size,
            seed=config.seed,
            sampling=config.sampling,
            on_failure=config.rollout.on_failure,
            max_retries=config.rollout.max_retries,
        )
        return await play_group(self.worker.context, GroupTask(**(values | changes)))


@pytest.fixture
async def bench(processor: Processor, tmp_path: Path) -> AsyncIterator[Callable[..., Bench]]:
    """`bench(Env, script, tasks=…, agent=…, run_config={…}, **rollout)`."""
    made: list[Bench] = []

    def make(
        env: type[Env],
        script: Script | str = "A",
        tasks: Any = None,
        agent: Any = None,
        run_config: dict[str, Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        **rollout: Any,
    ) -> Bench:
        values: dict[str, Any] = dict(group_size=1, groups_per_step=4) | rollout
        config = RunConfig(
            env="test-v0",
            rollout=RolloutConfig(**values),
            **(dict(sampling=SamplingParams(max_new_tokens=32)) | (run_config or {})),
        )
        engine = ScriptedEngine(processor, script)
        pool, journal = EnginePool([engine]), open_journal(tmp_path / f"journal-{len(made)}.db")
        store = MediaStore(tmp_path / "media")
        spec = EnvSpec("test-v0", env, tasks, kwargs or {})
        worker = RolloutWorker(spec, config, processor, pool, store, journal, "run", agent)
        made.append(Bench(worker, engine, pool, journal, store))
        return made[-1]

    yield make
    for item in made:
        await item.worker.close()
        await item.pool.close()
        item.journal.close()


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Let the event loop go on until something is so."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)

"""A real run that goes on until a test has seen enough of it, and what it is asked meanwhile."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from our_processes import children
from prepared_job import prepared_job
from relax_server.journal import open_journal
from relax_server.roles.controller import Controller
from relax_server.roles.launch import make_controller
from relax_server.roles.layout import RunLayout

import relax_sdk as relax
from relax_sdk.control import CONTROL, RunControl

SMALL = dict(
    rollout={"groups_per_step": 4, "group_size": 4, "max_turns": 1},
    warmup={"steps": 0},
    eval={"every": 0},
    training={"checkpoint_every": 1000},
)


class Heard:
    """An observer that remembers all but the warning that `SMALL` has no format warm-up."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.steps: list[dict[str, Any]] = []

    def stage(self, text: str) -> None: ...

    def warn(self, text: str) -> None:
        if "warmup.steps = 0 leaves the format warm-up out" not in text:
            self.warnings.append(text)

    def step(self, metrics: dict[str, Any]) -> None:
        self.steps.append(metrics)


@dataclass
class Going:
    """A run that goes on."""

    folder: Path
    heard: Heard
    controller: Controller
    task: asyncio.Task[None]

    async def until(self, condition: Callable[[], Any], seconds: float = 90.0) -> Any:
        """Wait for something to become true while the run goes on."""
        async with asyncio.timeout(seconds):
            while not (found := condition()):
                if self.task.done():
                    await self.task
                assert not self.task.done(), "the run ended"
                await asyncio.sleep(0.05)
        return found

    async def steps(self, more: int) -> None:
        """Wait for so many further steps."""
        target = len(self.heard.steps) + more
        await self.until(lambda: len(self.heard.steps) >= target)

    async def ask(self, do: Callable[[RunControl], Any]) -> Any:
        """Use the run's control as another program does."""

        def call() -> Any:
            with RunControl(self.folder) as control:
                return do(control)

        return await asyncio.wait_for(asyncio.to_thread(call), 60)

    async def engine(self, id: str, *states: str, seconds: float = 90.0) -> dict[str, Any]:
        """Wait until an engine is in one of these states; `gone` is one."""
        async with asyncio.timeout(seconds):
            while True:
                rows = {row["id"]: row for row in await self.ask(RunControl.list)}
                row = rows.get(id, {"id": id, "state": "gone"})
                if row["state"] in states:
                    return row
                assert not self.task.done(), "the run ended"
                await asyncio.sleep(0.2)

    def turns(self) -> list[relax.Turn]:
        """All that are in the journal."""
        groups = open_journal(RunLayout(self.folder).journal).groups(self.folder.name, limit=100_000)
        return [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]


@contextlib.asynccontextmanager
async def going(folder: Path, env: Any = "tone-v0", **settings: Any) -> AsyncIterator[Going]:
    """A run from its first step on; at the end nothing of it was lost or trained on twice."""
    others = children(recursive=True)
    trainer = relax.Trainer(env, folder=folder, **(SMALL | settings))
    job = prepared_job(trainer, steps=100_000)
    heard = Heard()
    controller = await make_controller(job, heard)
    run = Going(job.folder, heard, controller, asyncio.create_task(controller.run()))
    try:
        await run.until(lambda: heard.steps, 150)
        yield run
        assert not run.task.done()
    finally:
        controller.request_stop()
        with pytest.raises(relax.RunError, match="stopped at step"):
            await asyncio.wait_for(run.task, 120)
    assert [row["step"] for row in heard.steps] == list(range(1, len(heard.steps) + 1))
    counts = open_journal(RunLayout(run.folder).journal).counts(run.folder.name)
    assert counts.acked == len(heard.steps) * job.config.rollout.groups_per_step and counts.leased == 0
    assert not (run.folder / CONTROL).exists()
    told = [path for path in run.folder.rglob("*") if path.is_file() and re.search(rb"rle_[\w-]{43}", path.read_bytes())]
    assert not told, "the token of an engine is nowhere in the run folder"
    mine = [" ".join(command) for process, command in children(recursive=True).items() if process not in others]
    assert not [command for command in mine if str(run.folder) in command or "roles.child" in command]

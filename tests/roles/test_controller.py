"""What the controller does with its roles' messages; the roles are stand-ins that do as they are told."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from elastic_run import Heard
from relax_server.journal import open_journal
from relax_server.roles import main_roles
from relax_server.roles.claim import Claim
from relax_server.roles.controller import Controller
from relax_server.roles.layout import RunLayout
from relax_server.roles.messages import BatchTaken, Beat, Died, RolloutReport, Saved, StepDone, Stop
from relax_server.roles.placement import Exchange, Placement
from relax_server.roles.record import RunRecord

from relax_sdk import RunConfig, RunError
from relax_sdk.registry import EnvSpec
from relax_sdk.runtime import Job


class StandIn:
    """A role that remembers what it is told, and does nothing about it."""

    generation = 1

    def __init__(self, name: str, on_message: Callable[[Any], None]) -> None:
        self.name, self.on_message, self.told = name, on_message, list[Any]()

    def send(self, message: Any) -> None:
        self.told.append(message)

    def alive(self) -> bool:
        return "killed" not in self.told

    def kill(self) -> None:
        self.told.append("killed")
        self.on_message(Died(self.name, self.generation, -signal.SIGKILL, Path(f"{self.name}.log")))

    async def log_tail(self) -> str:
        return ""


class StandIns:
    """Places stand-ins."""

    def role(self, name: str, folder: Path, on_message: Callable[[Any], None], threads: int = 1) -> StandIn:
        return StandIn(name, on_message)


class Training:
    """A controller whose roles were started, and that trains."""

    def __init__(self, folder: Path) -> None:
        config = RunConfig("test-v0", steps=10)
        job = Job(EnvSpec("test-v0", "test:Test", None, {}), config, folder)
        self.heard = Heard()
        self.record = RunRecord(job, self.heard)
        self.journal = open_journal(RunLayout(folder).journal)
        claim = Claim(self.journal, folder.name, job.holder)
        weights = folder / "exchange"
        weights.mkdir()
        placement = cast(Placement, StandIns())
        exchange = Exchange(weights, None)
        self.controller = Controller(job, self.record, placement, self.journal, claim, folder, exchange)
        self.policy = cast(StandIn, self.controller.roles.policy.ranks["policy"])
        self.controller.figures.begin(0)
        self.task = asyncio.create_task(self.controller.train())
        self.controller.stopping.watch(self.task)
        self.reporting = asyncio.create_task(self.report())

    async def report(self) -> None:
        """The rollout is well all the time."""
        rollout = cast(StandIn, self.controller.rollout)
        while True:
            rollout.on_message(RolloutReport({"committed": 0, "in_flight": 0, "ended": 0, "warmup": (0, 0)}))
            await asyncio.sleep(0.1)

    async def until_told(self, message: Any) -> None:
        """Wait until the trainer was told something."""
        async with asyncio.timeout(20):
            while message not in self.policy.told:  # noqa: ASYNC110 - a stand-in tells nobody
                await asyncio.sleep(0.01)


@pytest.fixture
async def training(tmp_path: Path) -> AsyncIterator[Training]:
    made = Training(tmp_path)
    async with asyncio.timeout(20):
        while not made.controller.stopping.trains:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    yield made
    for task in (made.task, made.reporting):
        task.cancel()
    await asyncio.gather(made.task, made.reporting, return_exceptions=True)
    made.controller.figures.close()
    made.journal.close()


@pytest.mark.parametrize("last", [BatchTaken(0), Beat(waiting=True)], ids=["in a step", "while it waits"])
async def test_a_trainer_that_hangs_while_the_run_stops_is_killed(
    training: Training, last: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit for those that train holds for those that stop; Ctrl-C waits no longer than that."""
    if isinstance(last, BatchTaken):
        training.controller.roles.step_seconds = 0.5
    else:
        monkeypatch.setattr(main_roles, "SILENCE_SECONDS", 0.5)
    training.policy.on_message(last)
    training.controller.request_stop()
    with pytest.raises(RunError, match="stopped at step 0 of 10; go on with"):
        await asyncio.wait_for(training.task, 20)
    assert training.policy.told[-2:] == [Stop(), "killed"]
    said, ended = training.heard.warnings
    assert said == "the trainer said nothing for 0 s and is killed" and "the last checkpoint stays" in ended


async def test_a_last_checkpoint_may_take_longer_than_a_trainer_that_waits_may_be_silent(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_roles, "SILENCE_SECONDS", 0.5)
    training.policy.on_message(Beat(waiting=True))
    training.controller.request_stop()
    training.policy.on_message(Beat(waiting=False))  # it has seen the stop, and saves
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(training.task), 3)
    training.policy.on_message(Saved(0, Path("checkpoint"), last=True))
    with pytest.raises(RunError, match="stopped at step 0"):
        await asyncio.wait_for(training.task, 20)
    assert training.heard.warnings == [] and "killed" not in training.policy.told


async def test_a_step_that_was_trained_before_the_stop_has_its_figures(training: Training) -> None:
    training.controller.request_stop()
    done = StepDone(1, training.controller.weights_root / "v1", {"reward": 0.5})
    training.policy.on_message(done)
    training.policy.on_message(Saved(1, Path("checkpoint"), last=True))
    with pytest.raises(RunError, match="stopped at step 1 of 10"):
        await asyncio.wait_for(training.task, 20)
    (row,) = training.heard.steps
    assert (row["step"], row["reward"], row["engines"], row["dropped_total"]) == (1, 0.5, 0, 0)


async def test_failures_are_counted_by_cause_also_when_the_rollout_was_started_again(training: Training) -> None:
    rollout = cast(StandIn, training.controller.rollout)
    for failures in ({"EnvError": 3}, {"EnvError": 4}, {"EnvError": 1, "EpisodeTimeout": 1}):
        rollout.on_message(RolloutReport(dict(failures=failures, committed=0, in_flight=0, warmup=(0, 0))))
    training.policy.on_message(StepDone(1, training.controller.weights_root / "v1", {"reward": 0.5}))
    training.controller.request_stop()
    training.policy.on_message(Saved(1, Path("checkpoint"), last=True))
    with pytest.raises(RunError, match="stopped"):
        await asyncio.wait_for(training.task, 20)
    assert training.heard.steps[-1]["failures"] == {"EnvError": 5, "EpisodeTimeout": 1}

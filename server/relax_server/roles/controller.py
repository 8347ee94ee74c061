"""The controller: starts the roles of a run, hands weights and credits around, and restarts what dies."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from relax_sdk.errors import RelaxError, RunError
from relax_sdk.runtime import Job
from relax_server.journal.base import Journal
from relax_server.loading_time import seconds_to_load
from relax_server.roles import shared_memory
from relax_server.roles.autoscale import Autoscaler
from relax_server.roles.checks import algorithm_notes, check_division, check_hearing, check_journal, check_modalities
from relax_server.roles.claim import Claim
from relax_server.roles.control import RunControlServer
from relax_server.roles.field_roles import FieldRoles
from relax_server.roles.figures import Figures
from relax_server.roles.fleet import EngineFleet
from relax_server.roles.held_out import HeldOut
from relax_server.roles.inbox import START_SECONDS, Inbox
from relax_server.roles.layout import RunLayout
from relax_server.roles.main_roles import MainRoles
from relax_server.roles.messages import (
    BatchTaken,
    Begin,
    Died,
    EngineLeft,
    Evaluated,
    Evaluating,
    Failed,
    MakeWarmup,
    PolicyReady,
    Published,
    RolloutReady,
    RolloutReport,
    Saved,
    SetEngines,
    StepDone,
    Train,
    Warmup,
    WarmupMade,
    Warn,
)
from relax_server.roles.placement import Exchange, Placement
from relax_server.roles.progress import Progress
from relax_server.roles.record import RunRecord, reason_of
from relax_server.roles.restarts import Restarts
from relax_server.roles.status import RunState, RunStatus, StatusFile, role_statuses
from relax_server.roles.stopping import Stopping
from relax_server.roles.weight_sync import WeightSync
from relax_server.timeline import Timeline, write_trace


class Controller:
    """Runs one job from its first message to its last checkpoint; `launch.py` makes it.

    Args:
        job: the run.
        observer: is told how it goes, and keeps it.
        placement: starts the roles.
        journal: of the run; closed when the run ends.
        claim: of the run in it; given back then.
        model_path: the folder of the model that the run trains.
        exchange: where weights and media features are exchanged; removed when the run ends.
    """

    def __init__(
        self,
        job: Job,
        observer: RunRecord,
        placement: Placement,
        journal: Journal,
        claim: Claim,
        model_path: Path,
        exchange: Exchange,
    ) -> None:
        self.job, self.observer, self.config = job, observer, job.config
        self.placement, self.journal, self.claim = placement, journal, claim
        self.layout = RunLayout(job.folder)
        self.model_path, self.exchange, self.weights_root = model_path, exchange, exchange.root
        self.inbox = Inbox(job.folder / "logs", self.look_for_hangs, self.handle, self.failure)
        self.restarts = restarts = Restarts(job.how_to_resume)
        told = self.inbox.put
        self.roles = MainRoles(job, placement, restarts, self.model_path, exchange, self.hear_policy, told, observer.warn)
        self.policy, self.rollout = self.roles.policy, self.roles.rollout
        self.stopping = Stopping(self.policy, self.rollout)
        self.fields = FieldRoles(job, placement, restarts, self.model_path, exchange.features, told, observer.warn)
        self.engines = EngineFleet(
            job,
            placement,
            self.model_path,
            restarts,
            exchange.features,
            stage=observer.stage,
            warn=observer.warn,
            changed=self.engines_changed,
            failed=self.engines_failed,
        )
        self.figures = Figures(self.layout, observer)
        self.progress = Progress(job, journal, self.figures, observer)
        self.held_out = HeldOut(job.config.eval, job.config.steps, self.rollout, self.figures)
        self.control = RunControlServer(job.folder, self.engines, lambda: self.progress.stats.get("engines", []))
        batch = job.config.rollout.groups_per_step
        self.autoscaler = Autoscaler(job.config.autoscale, batch, self.engines, observer.warn)
        self.timeline = Timeline(self.layout.timeline, "controller")
        self.sync = WeightSync(job.config, exchange.root, self.engines, self.policy, self.rollout, self.timeline)
        self.status = StatusFile(self.layout.status, self.standing)
        self.state: RunState = "starting"
        self.reason = ""
        self.saved_last = False

    # ----------------------------------------------------------------------------------------------------------------- run

    async def run(self) -> None:
        """Train to the last step.

        Raises:
            ConfigError: the environment, model and settings do not fit together.
            RunError: a role failed for good; the folder can be resumed.
        """
        error: BaseException | None = None
        try:
            await self.work()
        except BaseException as ended:
            error = ended
            raise
        finally:
            stopped = self.stopping.requested
            self.state = "ended" if error is None else "stopped" if stopped else "failed"
            self.reason = "" if error is None else reason_of(error)
            self.status.write(self.standing())
            await self.observer.trackers.close("done" if error is None else "stopped" if stopped else "failed")
            self.observer.ended(error, stopped)

    async def work(self) -> None:
        """Train to the last step, or until a stop; then nothing of the run is left."""
        beside = [asyncio.create_task(self.claim.keep(self.claim_lost)), asyncio.create_task(self.status.keep())]
        work = asyncio.create_task(self.carry_out(beside))
        self.stopping.watch(work)
        try:
            await work
        except asyncio.CancelledError:
            if not self.stopping.requested:
                raise
            raise self.stopped() from None
        finally:
            await self.shut_down(beside)

    async def carry_out(self, beside: list[asyncio.Task[None]]) -> None:
        """Train to the last step, and evaluate; cancelled where a stop has nothing to wait for.

        Args:
            beside: gets what goes on beside it.
        """
        await self.start()
        await self.control.start()
        beside.append(asyncio.create_task(self.engines.watch()))
        await self.train()
        await self.finish()

    async def start(self) -> None:
        """Start all roles and bring them to the same weights."""
        check_modalities(self.job, self.model_path)
        check_hearing(self.config)
        check_division(self.config, self.model_path)
        check_journal(self.job, self.placement.journal, self.journal)
        for note in algorithm_notes(self.config):
            self.observer.warn(note)
        self.observer.stage("starting engine, trainer and environment")
        checkpoint = (self.layout.checkpoints() or [None])[-1] if self.job.resume else None
        if self.job.resume and checkpoint is None:
            self.observer.warn("no checkpoint in this folder yet: beginning at step 0")
        await self.roles.start_policy(checkpoint)
        await self.roles.start_rollout(self.engines)
        await self.engines.start(self.config.engines)
        rollout = await self.inbox.expect(RolloutReady)
        self.held_out.there = rollout.has_eval
        ready = await self.inbox.expect(PolicyReady, seconds_to_load(START_SECONDS, self.model_path, checkpoint))
        self.progress.step, self.sync.weights = ready.step, ready.weights
        self.figures.begin(ready.step, ready.figures)
        if checkpoint is None and self.config.warmup.steps and rollout.has_warmup:
            await self.warm_up()
        await self.fields.follow(ready.cluster)
        await self.sync.load(ready.step)

    async def warm_up(self) -> None:
        """The optional warm-up on the form of an action."""
        self.state = "warmup"
        self.progress.wait(f"warming up on the form of an action ({self.config.warmup.steps} steps, no answers in it)")
        self.rollout.send(MakeWarmup(self.config.warmup.steps))
        await self.inbox.expect(WarmupMade)
        self.progress.wait("")
        self.policy.send(Warmup())
        self.sync.weights = (await self.inbox.expect(PolicyReady)).weights

    async def train(self) -> None:
        """Handle events until the last checkpoint is saved."""
        self.state = "training"
        await self.progress.count_dropped()
        self.restarts.went_on("policy")
        self.let_play()
        self.let_train()
        if self.progress.step == 0:
            self.progress.wait("waiting for the first groups")
        else:
            self.observer.stage(f"going on at step {self.progress.step}")
        while True:
            message = await self.inbox.next()
            if isinstance(message, Saved) and message.last:
                self.saved_last = True  # the trainer's process ends with it
                await self.fields.stop()
                break
            await self.handle(message)
        if self.progress.step < self.config.steps:
            raise self.stopped()

    def let_play(self) -> None:
        """The rollout begins, where the run is now."""
        self.roles.rollout_is_well()
        self.rollout.send(Begin(self.engines.version, self.progress.consumed, self.progress.dropped))

    def let_train(self) -> None:
        """The trainer begins; from now on a stop is worth its checkpoint."""
        self.policy.send(Train())
        self.stopping.trains = True
        self.roles.policy_is_well()

    async def finish(self) -> None:
        """The last held-out evaluation, with the final weights."""
        self.state = "evaluating"
        last = self.progress.step
        while self.held_out.others_under_way(last):
            await self.handle(await self.inbox.next())
        if self.held_out.owed(last):
            self.observer.stage("held-out evaluation of the final weights")
            self.held_out.ask(last)
            while self.held_out.under_way(last):
                await self.handle(await self.inbox.next())

    async def shut_down(self, beside: list[asyncio.Task[None]]) -> None:
        """Stop every process and leave nothing behind.

        Args:
            beside: what goes on beside the run.
        """
        for task in beside:
            task.cancel()
        await self.control.stop()
        seconds = self.stopping.seconds
        trainer = self.policy.stop(seconds if self.saved_last or not self.stopping.requested else 0.0)
        await asyncio.gather(
            self.rollout.stop(seconds), trainer, self.engines.stop(), self.fields.stop(seconds), return_exceptions=True
        )
        shared_memory.remove(self.weights_root)
        with contextlib.suppress(OSError):
            self.figures.close()
        await self.claim.end()
        self.journal.close()
        self.timeline.close()
        with contextlib.suppress(OSError):  # no room for it: the run itself is whole
            write_trace(self.layout.timeline, self.layout.trace)

    def standing(self) -> RunStatus:
        """How the run stands."""
        named = self.roles.policy.ranks | {"rollout": self.rollout} | self.fields.all
        roles = role_statuses(named, self.engines.slots, self.restarts)
        told, progress = self.observer, self.progress
        return RunStatus(
            self.state, told.stage_text, progress.step, self.config.steps, roles, told.queue, progress.stats, self.reason
        )

    def request_stop(self, at_once: bool = False) -> None:
        """End after the step in progress, with a checkpoint; at once where nothing is being trained, or a second time."""
        self.observer.stage(self.stopping.request(at_once))

    def stopped(self) -> RunError:
        """The error of a run that was asked to stop."""
        self.progress.cut_short(self.inbox.rest(), len(self.engines.addresses))
        where = f"at step {self.progress.step} of {self.config.steps}" if self.figures.begun else "while it was starting"
        if self.progress.step == self.config.steps:
            where = "before the held-out evaluation of the final weights was done"
        return RunError(f"stopped {where}; go on with: {self.job.how_to_resume}")

    # -------------------------------------------------------------------------------------------------------------- events

    def look_for_hangs(self, now: float) -> None:
        """Kill the roles that were not heard of for too long."""
        if self.stopping.trains and self.exchange.renew():
            self.observer.warn(f"{self.weights_root} has vanished, with the weights in it; the trainer puts them out again")
            self.policy.kill()
        self.roles.look_for_hangs(now)
        self.fields.look_for_hangs(now)

    def hear_policy(self, message: Any) -> None:
        if isinstance(message, StepDone):
            self.progress.trained(message.step)
        elif isinstance(message, Saved):
            self.observer.saved(message.step, message.path)
            if message.last:
                self.stopping.saved()
        self.inbox.put(message)

    async def handle(self, message: Any) -> None:
        """React to one event."""
        self.autoscaler.hear(message)
        self.roles.hear(message)
        if isinstance(message, BatchTaken):
            self.sync.batch_taken()
            await self.free_devices()
        elif isinstance(message, StepDone):
            await self.step_done(message)
        elif isinstance(message, RolloutReport):
            self.progress.report(message.values)
            if await self.progress.count_dropped() and self.figures.begun:
                self.tell_rollout()
        elif isinstance(message, Evaluating) and self.saved_last:
            self.observer.stage(f"held-out evaluation of the final weights: {message.played}")
        elif isinstance(message, Evaluated):
            self.held_out.ended(message, newest=self.progress.step)
            await self.free_devices()
        elif isinstance(message, EngineLeft):
            self.engines.left(message.url)
        elif isinstance(message, Warn):
            self.observer.warn(message.text, role=message.role)
        elif isinstance(message, Failed):
            if message.fatal:
                raise await self.failure(message)
            self.observer.warn(message.text, role=message.role)
        elif isinstance(message, Died):
            await self.died(message)

    async def died(self, message: Died) -> None:
        """Start a role again that ended; not one that was told to end."""
        if self.stopping.requested:
            if message.role == "policy" and not self.saved_last:
                how = f"the trainer ended while it was stopping ({message.how})"
                self.observer.warn(f"{how}; the last checkpoint stays", role="policy")
                raise self.stopped()
        elif message.role in self.fields:
            if not self.saved_last:
                await self.fields.restart(message)
        elif not (message.role == "policy" and self.saved_last):
            await self.roles.restart(message, self.restart_policy if message.role == "policy" else self.restart_rollout)

    async def failure(self, message: Failed | Died) -> RunError:
        """The error of a run that a role's end or failure ends."""
        if isinstance(message, Failed):
            return RunError(f"{message.text} (logs: {self.job.folder / 'logs'})")
        return await self.roles.ended(message)

    async def step_done(self, message: StepDone) -> None:
        """New weights are out: load them, tell the rollout, write the figures.

        Where a step takes less time than loading its weights, the trainer is steps ahead by then; only the newest of these
        weights are loaded, and those that are to be evaluated.
        """
        if self.progress.take_in_hand(message):
            self.restarts.went_on("policy")
        self.sync.weights = message.weights
        evaluated = self.held_out.due(message.step)
        pause = await self.sync.load(message.step) if self.progress.newest or evaluated else 0.0
        await self.progress.count_dropped()
        self.tell_rollout()
        self.progress.step_ended(pause, len(self.engines.addresses))
        if evaluated:
            self.held_out.ask(message.step)

    def tell_rollout(self) -> None:
        """Which weights are loaded, and how many groups are used up; it may start others in the place of those dropped.

        The trainer drops groups while it waits for fresh ones, so the news cannot wait for its next step.
        """
        self.rollout.send(Published(self.engines.version, self.progress.consumed, self.progress.dropped))

    async def free_devices(self) -> None:
        """Let the trainer have the devices, unless an evaluation needs them."""
        await self.sync.free_devices(self.held_out.generates)

    # ------------------------------------------------------------------------------------------------------------ processes

    def claim_lost(self, why: str) -> None:
        """Another program carries the run out: this one ends."""
        self.inbox.put(Failed(why, fatal=True))

    def engines_changed(self, drain: float) -> None:
        """Other engines than before: the rollout leaves those that are gone."""
        self.rollout.send(SetEngines(self.engines.addresses, drain))

    def engines_failed(self, error: RelaxError) -> None:
        """No engine can be had any more: the run ends with the error."""
        self.inbox.put(Failed(str(error), fatal=True))

    async def restart_rollout(self) -> None:
        """Start the rollout again where the run is now."""
        await self.roles.start_rollout(self.engines)
        await self.inbox.expect(RolloutReady, again="rollout")
        self.let_play()
        self.held_out.ask_again()

    async def restart_policy(self) -> None:
        """Start the trainer again at its last checkpoint."""
        self.stopping.trains = False
        self.sync.trainer_lost()
        self.exchange.renew()
        await self.fields.leave()
        checkpoint = (self.layout.checkpoints() or [None])[-1]
        await self.roles.start_policy(checkpoint)
        limit = seconds_to_load(START_SECONDS, self.model_path, checkpoint)
        ready = await self.inbox.expect(PolicyReady, limit, again="policy")
        self.progress.step, self.sync.weights = ready.step, ready.weights
        self.figures.recover(ready.figures)
        await self.fields.follow(ready.cluster)
        await self.sync.load(ready.step)
        self.tell_rollout()
        self.let_train()

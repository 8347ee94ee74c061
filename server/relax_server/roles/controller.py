"""The controller: starts the roles of a run, hands weights and credits around, and restarts what dies."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from pathlib import Path
from typing import Any, TypeVar

from relax_sdk.errors import RelaxError, RunError
from relax_sdk.runtime import Job, Observer
from relax_server.journal.base import Journal
from relax_server.roles import shared_memory
from relax_server.roles.autoscale import Autoscaler
from relax_server.roles.checks import algorithm_notes, check_journal, check_modalities
from relax_server.roles.claim import Claim
from relax_server.roles.control import RunControlServer
from relax_server.roles.field_roles import FieldRoles
from relax_server.roles.figures import Figures, waited_for
from relax_server.roles.fleet import EngineFleet
from relax_server.roles.layout import RunLayout
from relax_server.roles.main_roles import MainRoles, RoleDied
from relax_server.roles.messages import (
    BatchTaken,
    Begin,
    Continue,
    Died,
    EngineLeft,
    Evaluate,
    Evaluated,
    Evaluating,
    Failed,
    Loading,
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
from relax_server.roles.restarts import Restarts
from relax_server.roles.stopping import Stopping
from relax_server.timeline import Timeline, write_trace

M = TypeVar("M")

START_SECONDS = 180.0
"""For a role to load its model and say that it is ready."""


class Controller:
    """Runs one job from its first message to its last checkpoint; `launch.py` makes it.

    Args:
        job: the run.
        observer: is told how it goes.
        placement: starts the roles.
        journal: of the run; closed when the run ends.
        claim: of the run in it; given back then.
        model_path: the folder of the model that the run trains.
        exchange: where weights and media features are exchanged; removed when the run ends.
    """

    def __init__(
        self,
        job: Job,
        observer: Observer,
        placement: Placement,
        journal: Journal,
        claim: Claim,
        model_path: Path,
        exchange: Exchange,
    ) -> None:
        self.job, self.observer, self.config = job, observer, job.config
        self.placement, self.journal, self.claim = placement, journal, claim
        self.layout = RunLayout(job.folder)
        self.run_name = job.folder.name
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.model_path, self.exchange, self.weights_root = model_path, exchange, exchange.root
        self.restarts = restarts = Restarts(job.how_to_resume)
        told = self.inbox.put_nowait
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
        self.control = RunControlServer(job.folder, self.engines, lambda: self.stats.get("engines", []))
        batch = job.config.rollout.groups_per_step
        self.autoscaler = Autoscaler(job.config.autoscale, batch, self.engines, observer.warn)
        self.weights: Path | None = None
        self.timeline = Timeline(self.layout.timeline, "controller")
        self.step = 0
        self.trained = 0
        """The last step that the trainer told of; ahead of `step` while weights are loaded."""
        self.in_hand: StepDone | None = None
        """A step whose weights are being loaded; its figures are written after that, or where a stop cuts it short."""
        self.dropped = 0
        """Groups that will never be trained on: too old, or set aside."""
        self.set_aside = 0
        """Groups set aside, as a training step fails on them; `dropped` counts them too."""
        self.furthest = 0
        """The last step of all that were done, also before the trainer went back to a checkpoint."""
        self.figures = Figures(self.layout, observer)
        self.stats: dict[str, Any] = {}
        self.looked_at = 0.0
        self.awaits_devices = False
        """Colocate: the trainer has its batch and waits for the engines' memory."""
        self.evaluating: set[int] = set()
        self.waiting = ""
        """What the first step waits for, in words; empty from then on."""
        self.has_eval = False
        self.saved_last = False

    # ----------------------------------------------------------------------------------------------------------------- run

    async def run(self) -> None:
        """Train to the last step.

        Raises:
            ConfigError: the environment, model and settings do not fit together.
            RunError: a role failed for good; the folder can be resumed.
        """
        beside = [asyncio.create_task(self.claim.keep(self.claim_lost))]
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
        rollout = await self.expect(RolloutReady)
        self.has_eval = rollout.has_eval
        ready = await self.expect(PolicyReady)
        self.step, self.weights = ready.step, ready.weights
        self.figures.begin(self.step)
        if checkpoint is None and self.config.warmup.steps and rollout.has_warmup:
            await self.warm_up()
        await self.fields.follow(ready.cluster)
        await self.load_weights()

    async def warm_up(self) -> None:
        """The optional warm-up on the form of an action."""
        self.waiting = f"warming up on the form of an action ({self.config.warmup.steps} steps, no answers in it)"
        self.observer.stage(self.waiting)
        self.rollout.send(MakeWarmup(self.config.warmup.steps))
        await self.expect(WarmupMade)
        self.waiting = ""
        self.policy.send(Warmup())
        self.weights = (await self.expect(PolicyReady)).weights

    def show_waiting(self) -> None:
        """How far the episodes are that the first step waits for."""
        if self.waiting and (counts := waited_for(self.stats, self.config.rollout.groups_per_step)):
            self.observer.stage(f"{self.waiting}: {counts}")

    async def train(self) -> None:
        """Handle events until the last checkpoint is saved."""
        await self.count_dropped(tell=False)
        self.restarts.went_on("policy")
        self.roles.rollout_is_well()
        self.rollout.send(Begin(self.engines.version, self.consumed, self.dropped))
        self.let_train()
        self.waiting = "waiting for the first groups" if self.step == 0 else ""
        self.observer.stage(self.waiting or f"going on at step {self.step}")
        while True:
            message = await self.next_event()
            if isinstance(message, Saved) and message.last:
                self.saved_last = True  # the trainer's process ends with it
                await self.fields.stop()
                break
            await self.handle(message)
        if self.step < self.config.steps:
            raise self.stopped()

    def let_train(self) -> None:
        """The trainer begins; from now on a stop is worth its checkpoint."""
        self.policy.send(Train())
        self.stopping.trains = True
        self.roles.policy_is_well()

    async def finish(self) -> None:
        """The last held-out evaluation, with the final weights."""
        while self.evaluating - {self.step}:
            await self.handle(await self.next_event())
        if self.has_eval and not self.figures.is_evaluated(self.step):
            self.observer.stage("held-out evaluation of the final weights")
            self.ask_evaluation(self.step)
            while self.step in self.evaluating:
                await self.handle(await self.next_event())

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

    def request_stop(self, at_once: bool = False) -> None:
        """End after the step in progress, with a checkpoint; at once where nothing is being trained, or a second time."""
        self.observer.stage(self.stopping.request(at_once))

    def stopped(self) -> RunError:
        """The error of a run that was asked to stop."""
        left = [self.in_hand, *(self.inbox.get_nowait() for _ in range(self.inbox.qsize()))]
        for message in left if self.figures.begun else ():
            if isinstance(message, StepDone):  # trained, and inside the checkpoint
                self.step = message.step
                self.write_figures(message, 0.0)
        where = f"at step {self.step} of {self.config.steps}" if self.figures.begun else "while it was starting"
        if self.step == self.config.steps:
            where = "before the held-out evaluation of the final weights was done"
        return RunError(f"stopped {where}; go on with: {self.job.how_to_resume}")

    @property
    def consumed(self) -> int:
        return self.step * self.config.rollout.groups_per_step

    # -------------------------------------------------------------------------------------------------------------- events

    async def next_event(self) -> Any:
        """The next message; deaths and hangs are turned into restarts here."""
        while True:
            if self.inbox.empty() and time.monotonic() - self.looked_at > 1.0:  # what is in it may be what we miss
                self.look_for_hangs()
            try:
                return await asyncio.wait_for(self.inbox.get(), 1.0)
            except TimeoutError:
                continue

    def look_for_hangs(self) -> None:
        """Kill the roles that were not heard of for too long."""
        now = self.looked_at = time.monotonic()
        if self.stopping.trains and self.exchange.renew():
            self.observer.warn(f"{self.weights_root} has vanished, with the weights in it; the trainer puts them out again")
            self.policy.kill()
        self.roles.look_for_hangs(now)
        self.fields.look_for_hangs(now)

    def hear_policy(self, message: Any) -> None:
        if isinstance(message, StepDone):
            self.trained = message.step
        elif isinstance(message, Saved) and message.last:
            self.stopping.saved()
        self.inbox.put_nowait(message)

    async def expect(self, kind: type[M], seconds: float = START_SECONDS, again: str = "") -> M:
        """Wait for one kind of message during the start; others are kept for later or handled as failures.

        Args:
            kind: of message.
            seconds: to wait; anew whenever an episode of the warm-up has ended.
            again: a role that is being started again. Its death is then told as such, and that of others is kept for later.

        Raises:
            RoleDied: the role that is being started again.
            RunError: a role died, failed or took too long.
        """
        kept: list[Any] = []
        try:
            async with asyncio.timeout(seconds) as limit:
                while True:
                    message = await self.inbox.get()
                    if isinstance(message, kind):
                        return message
                    if again and isinstance(message, Died):
                        if message.role == again:
                            raise RoleDied(message)
                    elif isinstance(message, Died) or (isinstance(message, Failed) and (message.fatal or not again)):
                        self.raise_failure(message)
                    if isinstance(message, (Warn, RolloutReport)):
                        played = self.stats.get("warmup")
                        await self.handle(message)
                        if self.stats.get("warmup") != played:
                            limit.reschedule(asyncio.get_running_loop().time() + seconds)
                    else:
                        kept.append(message)
        except TimeoutError:
            raise RunError(f"no {kind.__name__} within {seconds:.0f} s; see the logs in {self.job.folder / 'logs'}") from None
        finally:
            for message in kept:
                self.inbox.put_nowait(message)

    async def handle(self, message: Any) -> None:
        """React to one event."""
        self.autoscaler.hear(message)
        self.roles.hear(message)
        if isinstance(message, BatchTaken) and self.config.mode == "colocate":
            self.awaits_devices = True
            await self.free_devices()
        elif isinstance(message, StepDone):
            await self.step_done(message)
        elif isinstance(message, RolloutReport):
            self.stats = message.values
            self.show_waiting()
            await self.count_dropped()
        elif isinstance(message, Evaluating) and self.saved_last:
            self.observer.stage(f"held-out evaluation of the final weights: {message.played}")
        elif isinstance(message, Evaluated):
            self.evaluating.discard(message.step)
            self.figures.evaluated(message, newest=self.step)
            await self.free_devices()
        elif isinstance(message, EngineLeft):
            self.engines.left(message.url)
        elif isinstance(message, Warn):
            self.observer.warn(message.text)
        elif isinstance(message, Failed):
            if message.fatal:
                self.raise_failure(message)
            self.observer.warn(message.text)
        elif isinstance(message, Died):
            await self.died(message)

    async def died(self, message: Died) -> None:
        """Start a role again that ended; not one that was told to end."""
        if self.stopping.requested:
            if message.role == "policy" and not self.saved_last:
                self.observer.warn(f"the trainer ended while it was stopping ({message.how}); the last checkpoint stays")
                raise self.stopped()
        elif message.role in self.fields:
            if not self.saved_last:
                await self.fields.restart(message)
        elif not (message.role == "policy" and self.saved_last):
            await self.roles.restart(message, self.restart_policy if message.role == "policy" else self.restart_rollout)

    def raise_failure(self, message: Failed | Died) -> None:
        if isinstance(message, Failed):
            raise RunError(f"{message.text} (logs: {self.job.folder / 'logs'})")
        raise self.roles.ended(message)

    async def step_done(self, message: StepDone) -> None:
        """New weights are out: load them, tell the rollout, write the figures.

        Where a step takes less time than loading its weights, the trainer is steps ahead by then; only the newest of these
        weights are loaded, and those that are to be evaluated.
        """
        if message.step > self.furthest:
            self.furthest = message.step
            self.restarts.went_on("policy")
        self.step, self.weights, self.waiting, self.in_hand = message.step, message.weights, "", message
        every = self.config.eval.every
        evaluated = bool(self.has_eval and every and self.step % every == 0 and self.step < self.config.steps)
        newest = self.step == self.trained
        pause = await self.load_weights() if newest or evaluated else 0.0
        await self.count_dropped(tell=False)
        self.tell_rollout()
        self.in_hand = None
        self.write_figures(message, pause)
        if evaluated:
            self.ask_evaluation(self.step)

    def write_figures(self, message: StepDone, pause: float) -> None:
        """One row of metrics: what the trainer told of a step, and how the run stands.

        Args:
            message: the step.
            pause: seconds that loading its weights took.
        """
        metrics = message.metrics | {"seconds_load": pause, "engines": len(self.engines.urls)}
        metrics |= {"dropped_total": self.dropped - self.set_aside, "set_aside_total": self.set_aside}
        metrics |= {f"rollout_{k}": v for k, v in self.stats.items() if isinstance(v, (int, float))}
        self.figures.add(message.step, metrics)

    def tell_rollout(self) -> None:
        """Which weights are loaded, and how many groups are used up."""
        self.rollout.send(Published(self.engines.version, self.consumed, self.dropped))

    async def count_dropped(self, tell: bool = True) -> None:
        """Look up how many groups were too old at their lease, or set aside; the rollout may start others in their place.

        The trainer drops them while it waits for fresh ones, so the news cannot wait for its next step.
        """
        counts = await asyncio.to_thread(self.journal.counts, self.run_name)
        dropped, self.set_aside = counts.given_up, counts.failed
        if dropped != self.dropped:
            self.dropped = dropped
            if tell and self.figures.begun:
                self.tell_rollout()

    def ask_evaluation(self, step: int) -> None:
        self.evaluating.add(step)
        self.rollout.send(Evaluate(step, "eval", self.config.eval.limit))

    # ------------------------------------------------------------------------------------------------------------- weights

    async def load_weights(self) -> float:
        """Bring every engine to the current weights.

        Returns:
            Seconds it took.
        """
        assert self.weights is not None
        began = time.perf_counter()
        version = self.config.version_at(self.step)
        self.rollout.send(Loading(version))
        with self.timeline.span("load weights", version=version):
            await self.engines.load(self.weights, version)
        for old in self.weights_root.glob("v*"):
            if old != self.weights and int(old.name[1:]) < version:
                shutil.rmtree(old, ignore_errors=True)
        return time.perf_counter() - began

    async def free_devices(self) -> None:
        """Colocate: once nothing is being generated, the engines give their memory back and the trainer goes on."""
        if self.awaits_devices and not self.evaluating:
            self.awaits_devices = False
            await self.engines.release()
            self.policy.send(Continue())

    # ------------------------------------------------------------------------------------------------------------ processes

    def claim_lost(self, why: str) -> None:
        """Another program carries the run out: this one ends."""
        self.inbox.put_nowait(Failed(why, fatal=True))

    def engines_changed(self, drain: float) -> None:
        """Other engines than before: the rollout leaves those that are gone."""
        self.rollout.send(SetEngines(self.engines.urls, self.engines.attached, drain))

    def engines_failed(self, error: RelaxError) -> None:
        """No engine can be had any more: the run ends with the error."""
        self.inbox.put_nowait(Failed(str(error), fatal=True))

    async def restart_rollout(self) -> None:
        """Start the rollout again where the run is now."""
        await self.roles.start_rollout(self.engines)
        await self.expect(RolloutReady, again="rollout")
        self.roles.rollout_is_well()
        self.rollout.send(Begin(self.engines.version, self.consumed, self.dropped))
        for step in self.evaluating:
            self.rollout.send(Evaluate(step, "eval", self.config.eval.limit))

    async def restart_policy(self) -> None:
        """Start the trainer again at its last checkpoint."""
        self.awaits_devices = self.stopping.trains = False
        self.exchange.renew()
        await self.fields.leave()
        await self.roles.start_policy((self.layout.checkpoints() or [None])[-1])
        ready = await self.expect(PolicyReady, again="policy")
        self.step, self.weights = ready.step, ready.weights
        await self.fields.follow(ready.cluster)
        await self.load_weights()
        self.tell_rollout()
        self.let_train()

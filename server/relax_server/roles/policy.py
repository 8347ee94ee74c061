"""The policy role: leases batches, trains, publishes weights, saves checkpoints and acks what is inside them."""

from __future__ import annotations

import dataclasses
import queue
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_sdk.errors import DiskFull, OutOfMemory, RelaxError, TrainingError
from relax_sdk.media import MediaRef, MediaStore
from relax_sdk.trajectory import Group, Trajectory
from relax_server.bus import open_bus
from relax_server.bus.base import GroupBatch
from relax_server.garbage import settle
from relax_server.journal import open_journal
from relax_server.models.device import gpu_missed
from relax_server.roles.batch_figures import batch_figures
from relax_server.roles.channel import Outlet
from relax_server.roles.field_worker import wait_for_fields
from relax_server.roles.fresh_gaps import fresh_gaps
from relax_server.roles.layout import RunLayout
from relax_server.roles.messages import (
    BatchTaken,
    Beat,
    Cluster,
    Continue,
    PolicyReady,
    Saved,
    StartPolicy,
    StepDone,
    Stop,
    Train,
    Warmup,
    Warn,
)
from relax_server.roles.outputs import plain
from relax_server.roles.poison import POISON, check_bearable, poisoned
from relax_server.roles.policy_ranks import join_ranks, make_policy, run_rank
from relax_server.roles.token_records import TokenRecords
from relax_server.timeline import Timeline
from relax_server.training.group_fields import ADVANTAGES_FIELD, REF_LOG_PROBS, Given, field_names
from relax_server.training.ranks import AllRanks

if TYPE_CHECKING:
    from relax_server.bus.field_queue import FieldQueue

CONSUMER = "policy"
LEASE_SECONDS = 1800.0
RENEW_SECONDS = 300.0
BEAT_SECONDS = 1.0
POLL_SECONDS = 0.25
"""How long one wait for groups lasts before control messages are looked at."""

CONTINUE_SECONDS = 1500.0
"""How long the controller may take to free the devices in colocate mode, an evaluation included; the lease outlives it."""


def run_policy(channel: Outlet, inbox: queue.SimpleQueue[Any], first: StartPolicy) -> None:
    """Serve until the last step or a `Stop`; a rank other than 0 does what rank 0 has it do."""
    join_ranks(first)
    if first.rank:
        run_rank(channel, first)
        return
    role = PolicyRole(channel, inbox, first)
    role.begin()
    serve(role, inbox)
    role.ranks.end()


def serve(role: PolicyRole, inbox: queue.SimpleQueue[Any]) -> None:
    """Do what the controller wants, to the last step or a `Stop`."""
    while True:
        message = inbox.get()
        if isinstance(message, Warmup):
            role.warm_up()
        elif isinstance(message, Train):
            role.train()
            return
        elif isinstance(message, Stop):
            return


@dataclass(frozen=True)
class PendingSave:
    """A checkpoint that was begun, and is not known to be complete."""

    step: int
    folder: Path
    groups: list[str]
    """They are acked when it is complete."""


class PolicyRole:
    """A `PolicyModel` between the bus and the folder its weights go to."""

    def __init__(self, channel: Outlet, inbox: queue.SimpleQueue[Any], first: StartPolicy) -> None:
        self.channel, self.inbox, self.start = channel, inbox, first
        config = first.config
        self.layout = RunLayout(first.folder)
        self.store = MediaStore(self.layout.media)
        self.journal = open_journal(first.journal or self.layout.journal, claim=first.claim)
        ahead = (config.batches_ahead + 1) * config.rollout.groups_per_step  # all that the rollout may be ahead
        lease = max(LEASE_SECONDS, 2 * config.training.step_timeout)
        self.bus = open_bus(config.bus, self.journal, first.run, CONSUMER, ttl=lease, ahead=ahead)
        self.policy = make_policy(first)
        self.ranks = AllRanks(self.policy, self.media)
        self.records = TokenRecords(self.journal, first.run) if config.training.record_tokens else None
        self.unsaved: list[str] = []
        """Groups trained on since the last checkpoint was begun."""
        self.pending: PendingSave | None = None
        """The checkpoint that is being written."""
        self.told: list[dict[str, Any]] = []
        """Figures of the last steps, oldest first, each with its `step`: at least those since the checkpoint before the last
        one was begun, and as many as the controller may be behind."""
        self.told_before = 0
        """How many of them are of steps up to the last checkpoint."""
        self._renewed = self._beat = time.monotonic()
        self.timeline = Timeline(self.layout.timeline, "policy")

    def media(self, ref: MediaRef) -> bytes:
        return self.store.get(ref)

    # ------------------------------------------------------------------------------------------------- begin and warm up

    def begin(self) -> None:
        """Load the checkpoint, if there is one, put the weights out and say so."""
        missed = gpu_missed()
        if missed:
            self.channel.send(Warn(missed, "policy"))
        if self.start.checkpoint is not None:
            if self.layout.reference.exists():
                self.ranks.call("load_reference", self.layout.reference)
            meta = self.ranks.call("load", self.start.checkpoint)
            self.bus.ack(meta["groups"], self.policy.step)  # it may have died between the checkpoint and its ack
            self.told = meta.get("figures", [])  # a checkpoint of an earlier version has none
            self.told_before = len(self.told)
        self.bus.restore(self.policy.step)
        self.ready()

    def ready(self) -> None:
        """Put the weights out, leave the devices to the engines where they take turns, and say so."""
        weights = self.put_out()
        self.park()
        self.channel.send(PolicyReady(self.policy.step, weights, self.cluster, tuple(self.told)))

    def park(self) -> None:
        """Leave the devices, if the policy does that."""
        if self.policy.parks:
            with self.timeline.span("leave devices", step=self.policy.step):
                self.ranks.call("park")

    def unpark(self) -> None:
        """Take the devices."""
        if self.policy.parks:
            with self.timeline.span("take devices", step=self.policy.step):
                self.ranks.call("unpark")

    @property
    def cluster(self) -> Cluster | None:
        """The Ray cluster that the queue has started for this process."""
        fields = self.bus.fields
        return Cluster(*fields.cluster) if fields is not None and fields.cluster is not None else None

    def warm_up(self) -> None:
        """Supervised steps on the form of an action, then fresh weights and a checkpoint: it is not done again."""
        self.unpark()
        config = self.start.config.warmup
        groups = self.journal.groups(self.start.run, split="warmup", limit=config.steps, newest_first=False)
        for group in groups:
            samples = [sample for trajectory in group.counted for sample in trajectory.samples()]
            with self.timeline.span("warm-up step"):
                self.ranks.call("warmup_step", samples, config.lr)
        self.ranks.call("end_warmup")
        if self.start.config.algorithm.kl_coef:
            self.ranks.call("export", self.layout.reference)
        self.save()
        self.end_save()  # the run cannot begin again without it
        self.ready()

    @property
    def version(self) -> int:
        """Version of the current weights."""
        return self.start.config.version_at(self.policy.step)

    def put_out(self) -> Path:
        """Write the weights of the current step to shared memory."""
        folder = self.start.weights / f"v{self.version}"
        with self.timeline.span("publish", version=self.version):
            folder.mkdir(exist_ok=True)  # not its parents: they are gone once nobody needs them
            self.ranks.call("export_weights", folder)
        return folder

    # --------------------------------------------------------------------------------------------------------------- train

    def train(self) -> None:
        """Train to the last step, or until a `Stop`."""
        config = self.start.config
        settle()
        while self.policy.step < config.steps:
            began = time.perf_counter()
            with self.timeline.span("wait", step=self.policy.step + 1):
                batch = self.take()
            if batch is None:
                break
            given, seconds_fields = None, 0.0
            if self.bus.fields is not None:
                waited = time.perf_counter()
                with self.timeline.span("fields", step=self.policy.step + 1):
                    given = self.take_fields(batch, self.bus.fields)
                if given is None:
                    self.bus.give_back(batch)
                    break
                seconds_fields = time.perf_counter() - waited
            if not self.begin_step():
                self.bus.give_back(batch)
                break
            try:
                done = self.one_step(batch, given, began, seconds_fields)
            except (DiskFull, OutOfMemory):  # no group is to blame
                raise
            except POISON as error:
                self.set_poison_aside(batch, given, error)
                continue
            if not self.policy.parks:
                self.channel.send(done)
            if self.policy.step % config.training.checkpoint_every == 0 and self.policy.step < config.steps:
                self.save()
            if self.policy.parks:  # engines take the devices when they hear of the step
                self.park()
                self.channel.send(done)
        self.channel.send(Beat(waiting=False))  # a `Stop` may have come while it waited
        self.save(last=True)

    def take(self) -> GroupBatch | None:
        """The next batch; None when a `Stop` came first."""
        config, waited = self.start.config, 0.0
        while True:
            if self.stopped():
                return None
            batch = self.bus.take(config.rollout.groups_per_step, self.version, config.max_staleness, POLL_SECONDS)
            if batch is not None:
                break
            waited += POLL_SECONDS
        return dataclasses.replace(batch, waited=batch.waited + waited)

    def take_fields(self, batch: GroupBatch, fields: FieldQueue) -> Given | None:
        """Fields of a batch that other roles compute, once it is there; None when a `Stop` came first.

        Raises:
            RunError: it did not come in time.
        """
        ids, names = [group.id for group in batch.groups], field_names(self.start.config)
        rows = wait_for_fields(fields, ids, names, self.stopped)
        return None if rows is None else given_of([row.fields for row in rows])

    def begin_step(self) -> bool:
        """Tell the controller, and in colocate mode wait for the devices; False on a `Stop`."""
        self.channel.send(BatchTaken(self.policy.step))
        if self.start.config.mode != "colocate":
            return True
        with self.timeline.span("wait for devices", step=self.policy.step + 1):
            return self.wait_for_devices()

    def beat(self) -> None:
        """Tell the controller that this process waits and is well, about once a second."""
        if time.monotonic() - self._beat > BEAT_SECONDS:
            self.channel.send(Beat(waiting=True))
            self._beat = time.monotonic()

    def stopped(self) -> bool:
        """Whether a `Stop` is waiting."""
        self.beat()
        self.look_at_save()
        if time.monotonic() - self._renewed > RENEW_SECONDS:
            self.bus.renew()
            self._renewed = time.monotonic()
        try:
            return isinstance(self.inbox.get_nowait(), Stop)
        except queue.Empty:
            return False

    def wait_for_devices(self) -> bool:
        """In colocate mode: wait until the engines have given their memory back; False on a `Stop`."""
        end = time.monotonic() + CONTINUE_SECONDS
        while time.monotonic() < end:
            self.beat()
            try:
                message = self.inbox.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            self.channel.send(Beat(waiting=False))
            return isinstance(message, Continue)
        raise TrainingError(f"the controller did not free the devices within {CONTINUE_SECONDS:.0f} s")

    def one_step(self, batch: GroupBatch, given: Given | None, began: float, seconds_fields: float) -> StepDone:
        """Train on one batch and put the new weights out."""
        taken = time.perf_counter()
        self.unpark()
        metrics: dict[str, Any] = dict(self.ranks.call("train_step", batch.groups, batch.version, given))
        trained = time.perf_counter()
        if self.records is not None and self.policy.tokens is not None:
            self.records.add(batch.groups, self.policy.tokens, self.policy.step, batch.version)
        if self.policy.tokens is not None:
            metrics |= fresh_gaps(self.policy.tokens, batch.version)
        for stage, start, end in self.policy.spans:
            self.timeline.add(stage, start, end, step=self.policy.step)
        self.unsaved += [group.id for group in batch.groups]
        self.bus.forget([group.id for group in batch.groups])
        weights = self.put_out()
        done = time.perf_counter()
        metrics |= dict(
            seconds_wait=taken - began,
            seconds_fields=seconds_fields,
            seconds_train=trained - taken,
            seconds_publish=done - trained,
            seconds_step=done - began,
            queue=batch.ready,
            dropped=batch.dropped,
            staleness_mean=sum(batch.staleness) / max(len(batch.staleness), 1),
            staleness_max=max(batch.staleness, default=0),
            staleness_histogram=histogram(batch.staleness),
            rewards=mean_of(batch.groups, lambda trajectory: trajectory.rewards),
            episode_seconds=mean_of(batch.groups, lambda trajectory: trajectory.timings),
        )
        metrics |= batch_figures(batch.groups, self.policy.step)
        metrics["time"] = time.time()
        self.told.append(plain({"step": self.policy.step} | metrics))
        return StepDone(self.policy.step, weights, metrics)

    def set_poison_aside(self, batch: GroupBatch, given: Given | None, error: RelaxError) -> None:
        """Set aside the groups of a failed batch that fail alone too, and give back the others.

        Args:
            batch: that was taken.
            given: of it.
            error: that the step ended with.

        Raises:
            RelaxError: `error`, where no single group is to blame; also where one was, but this process must begin again at
                its checkpoint, as an update was made already or the engines have given their memory back.
            RunError: too many groups of the run were set aside.
        """

        def attempt(index: int) -> None:
            own = given.only(index) if given is not None else None
            self.ranks.call("attempt", batch.groups[index], batch.version, own)

        found = poisoned(batch.groups, attempt)
        for id, reason in found.items():
            self.bus.set_aside(id, reason)
            self.channel.send(Warn(f"group {id} cannot be trained on and was set aside: {reason}", "policy"))
        self.bus.give_back(batch)
        if not found:
            raise error
        counts = self.journal.counts(self.start.run)
        trained = counts.acked + len(self.unsaved) + (len(self.pending.groups) if self.pending is not None else 0)
        check_bearable(counts.failed, counts.failed + trained, [*found.values()][-1])
        if self.policy.updates_taken or self.start.config.mode == "colocate":
            raise error

    # ---------------------------------------------------------------------------------------------------------- checkpoints

    def save(self, last: bool = False) -> None:
        """Begin a checkpoint; with asynchronous ones training goes on while it is written.

        Args:
            last: nothing is trained any more; it is complete when this returns.
        """
        self.unpark()
        self.end_save()
        step = self.policy.step
        folder = self.layout.checkpoint(step)
        waits = last or not self.start.config.training.async_checkpoints
        with self.timeline.span("checkpoint", step=step):
            if self.records is not None:
                self.records.finish()
            if not folder.exists():
                meta = {"groups": self.unsaved, "step": step, "figures": self.told}
                self.ranks.call("begin_save", folder, meta, waits)
        unsure = self.start.config.batches_ahead + 1
        self.told = self.told[min(self.told_before, max(0, len(self.told) - unsure)) :]
        self.told_before = len(self.told)
        self.pending = PendingSave(step, folder, self.unsaved)
        self.unsaved = []
        if waits:
            self.end_save(last)

    def look_at_save(self) -> None:
        """End the checkpoint that is being written, if it is complete."""
        if self.pending is not None and (self.policy.saving is None or self.policy.saving.done):
            self.end_save()

    def end_save(self, last: bool = False) -> None:
        """Wait for the checkpoint that is being written, then ack what it contains; after the last one, write the model too."""
        pending, saving = self.pending, self.policy.saving
        if pending is None:
            return
        self.ranks.call("finish_save")
        if saving is not None:
            self.timeline.add("write checkpoint", saving.began, saving.ended, step=pending.step)
        self.bus.ack(pending.groups, pending.step)
        self.pending = None
        for old in self.layout.checkpoints()[: -self.start.config.training.keep_checkpoints]:
            shutil.rmtree(old, ignore_errors=True)
        if last:
            self.bus.release_ahead()
            self.ranks.call("export", self.layout.weights)
        self.channel.send(Saved(pending.step, pending.folder, last))


def given_of(rows: list[dict[str, Any]]) -> Given:
    """The fields of a batch."""
    reference = [fields[REF_LOG_PROBS] for fields in rows] if REF_LOG_PROBS in rows[0] else None
    return Given([fields[ADVANTAGES_FIELD] for fields in rows], reference)


def histogram(values: list[int]) -> dict[str, int]:
    """Count of every value, by its text (a JSON object's keys)."""
    return {str(v): values.count(v) for v in sorted(set(values))}


def mean_of(groups: list[Group], figures: Callable[[Trajectory], dict[str, float]]) -> dict[str, float]:
    """Mean of every named figure over a batch's trajectories that have it."""
    totals: dict[str, list[float]] = {}
    for group in groups:
        for trajectory in group.trajectories:
            for name, value in figures(trajectory).items():
                totals.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in totals.items()}

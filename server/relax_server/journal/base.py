"""The journal interface: a finished group is durable before anything is told of it, and is trained exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from relax_sdk.run_lock import Holder
from relax_sdk.trajectory import Group, Trajectory
from relax_server.journal.claims import Claimed, Held
from relax_server.journal.finding import GroupRow, MediaRow, TrajectoryQuery, TrajectoryRow
from relax_server.journal.trained import TrainedGroup


@dataclass(frozen=True)
class Lease:
    """A group handed to a consumer for a while."""

    group: Group
    version_min: int
    expires_at: float
    """Unix seconds."""


@dataclass(frozen=True)
class LeaseResult:
    """What `Journal.lease` found."""

    leases: list[Lease]
    dropped: int
    """Groups that were too old, now marked `stale`; they are never served."""


@dataclass(frozen=True)
class JournalCounts:
    """Groups by state."""

    ready: int = 0
    leased: int = 0
    acked: int = 0
    stale: int = 0
    """Dropped because they were too old, at a lease or before a batch was made of them."""
    empty: int = 0
    """Committed without a single response token: nothing to train on, so never served."""
    failed: int = 0
    """Set aside, as a training step fails on them; see `Journal.set_aside`."""

    @property
    def total(self) -> int:
        return self.ready + self.leased + self.acked + self.stale + self.empty + self.failed

    @property
    def given_up(self) -> int:
        """Groups that were to be trained on and never will be: too old, or set aside."""
        return self.stale + self.failed


class Journal(Protocol):
    """Durable groups with leases.

    States of a group: `ready` → `leased` → `acked`; a lease that ends unacked returns to `ready`; a group older than
    allowed becomes `stale` at the lease, or by `drop` once leased; one that cannot be trained on becomes `failed` by
    `set_aside`; one without any response token is `empty` from the start. Groups of other splits than `train` are kept but
    have no part in this. Methods are synchronous, safe from several threads and processes, and raise `JournalError` when the
    store cannot be read or written.

    Leases end by wall time, and wall time jumps. Set back, no lease lasts longer than its `ttl` from the next `lease` call
    on. Set forward, leases end early: another consumer may take the groups, and then the ack of the one that had them is
    refused. A consumer's own leases never come back to it by time, only by `restore` and `release`, or when it opens the
    journal anew and they end: a consumer that lives is never served a group twice.
    """

    def commit(self, group: Group, run: str, split: str = "train", owner: str | None = None) -> bool:
        """Make a group durable: rows, versions and tokens in one transaction; media files must be in the store already.

        Args:
            group: finished.
            run: that it belongs to.
            split: of its task.
            owner: id of the key that it was made for. A run belongs to the first owner that it was written to for; training
                programs, which write for none, are one owner.

        Returns:
            False when a group of this id is already there: committing again changes nothing.

        Raises:
            JournalError: the run is another owner's, the group's id is taken in another run or split, a trajectory's id is
                taken by another group or occurs twice, a reward is not finite, or tokens of a train group have no logprobs or
                weight versions.
        """
        ...

    def commit_many(
        self, groups: Sequence[Group], run: str, split: str = "train", owner: str | None = None, held: Held | None = None
    ) -> list[bool]:
        """`commit` for several groups in one transaction, which waits for the disk once: all or, when it raises, none.

        Args:
            groups: as in `commit`, and so are `run`, `split` and `owner`.
            held: the claim that they are made under; None: under none.

        Raises:
            ClaimLost: another program has what they were made for, or it is over.
        """
        ...

    def lease(self, n: int, run: str, consumer: str, version: int, max_staleness: int, ttl: float) -> LeaseResult:
        """Lease the `n` oldest ready train groups of `run` whose staleness `version - version_min` is at most `max_staleness`.

        All or nothing: fewer than `n` leaves them ready. Oldest means committed first. Leases of other consumers that ended
        count as ready; one's own do not (see above). Groups that are too old are marked `stale` and counted even when
        nothing is leased. After a restart from an older checkpoint a group may be *ahead* of `version`; it is served.

        Raises:
            ConfigError: `n`, `max_staleness` or `ttl` is out of range.
        """
        ...

    def renew(self, run: str, consumer: str, ttl: float) -> int:
        """Extend all leases that a consumer took since the journal was opened; returns how many it still holds.

        They end `ttl` seconds from now. A lease that ended is still held while no other consumer took it.
        """
        ...

    def ack(self, group_ids: Sequence[str], run: str, consumer: str, checkpoint: int) -> int:
        """The groups are inside checkpoint `checkpoint`; returns how many of them are now acked.

        Repeating it, also with a later checkpoint, changes nothing. A lease that ended suffices while no other consumer
        took the group. All or nothing.

        Raises:
            JournalError: a group is unknown, not leased, leased to or acked by another consumer, or acked in a later
                checkpoint already.
        """
        ...

    def release(self, group_ids: Sequence[str], run: str, consumer: str) -> int:
        """Give back leases that were not used: the groups are `ready` at once, also for the same consumer.

        Groups that the consumer does not hold are left alone.

        Returns:
            How many leases ended.
        """
        ...

    def drop(self, group_ids: Sequence[str], run: str, consumer: str) -> int:
        """Mark leased groups as `stale`: they have become too old since they were leased, and are never served again.

        Groups that the consumer does not hold are left alone.

        Returns:
            How many were dropped.
        """
        ...

    def set_aside(self, group_id: str, run: str, consumer: str, reason: str) -> bool:
        """Mark a leased group as `failed`, with the reason: it cannot be trained on, and is never served again.

        Returns:
            False where the consumer does not hold it; then nothing changes.
        """
        ...

    def failures(self, run: str) -> dict[str, str]:
        """Reasons of the groups that were set aside, by group id, oldest group first."""
        ...

    def restore(self, run: str, consumer: str, checkpoint: int) -> int:
        """A trainer restarts from `checkpoint`: its leases, and acks that name a later checkpoint, return to `ready`.

        The acks are those of the whole run, also under another consumer's name: checkpoints belong to the run. Groups
        dropped as stale stay dropped, and those set aside stay so.

        Returns:
            How many groups became ready again.
        """
        ...

    def counts(self, run: str) -> JournalCounts:
        """Train groups of a run by state; leases that ended count as ready."""
        ...

    def task_indices(self, run: str) -> list[int]:
        """Task indices of all committed train groups of a run, ascending; a restarted rollout plays those that are missing."""
        ...

    def groups(self, run: str, split: str = "train", limit: int = 100, newest_first: bool = True) -> list[Group]:
        """Whole groups, tokens included."""
        ...

    def fetch(self, group_ids: Sequence[str]) -> list[Group]:
        """Groups by id, tokens included, in the order of `group_ids`, whatever their state.

        Raises:
            JournalError: one is unknown.
        """
        ...

    def trajectory(self, id: str) -> Trajectory:
        """One trajectory.

        Raises:
            JournalError: unknown.
        """
        ...

    def trajectories(self, run: str, split: str | None = None, limit: int = 100, offset: int = 0) -> list[TrajectoryRow]:
        """Newest first, without tokens."""
        ...

    def find(self, run: str, query: TrajectoryQuery) -> list[TrajectoryRow]:
        """Trajectories of a run that a query asks for, in its order, without tokens."""
        ...

    def count(self, run: str, query: TrajectoryQuery) -> int:
        """How many trajectories of a run a query asks for, whatever its limit and offset say."""
        ...

    def by_seq(self, seq: int) -> Trajectory:
        """One trajectory by its place in the order of commits, `TrajectoryRow.seq`.

        Raises:
            JournalError: unknown.
        """
        ...

    def group_row(self, group_id: str) -> GroupRow:
        """What became of a group.

        Raises:
            JournalError: unknown.
        """
        ...

    def media(self, run: str, after: int = 0, limit: int = 1000) -> list[MediaRow]:
        """The different images, sounds and videos that a run's trajectories have shown, in the order of their first showing.

        Args:
            run: of the trajectories; those committed by a version before this list are not in it.
            after: only items with a larger `MediaRow.seq`.
            limit: items at most.
        """
        ...

    def splits(self, run: str) -> dict[str, int]:
        """How many trajectories a run has of each split."""
        ...

    def runs(self) -> list[str]:
        """Names of all runs, oldest first."""
        ...

    def record_trained(self, run: str, records: Sequence[TrainedGroup]) -> None:
        """Keep what an optimizer step made of its groups; a group trained again after a restart keeps only the last record.

        Args:
            run: of the groups; those that it does not have are passed over.
            records: one per group.
        """
        ...

    def trained(self, group_id: str) -> TrainedGroup | None:
        """What the last step that trained on a group made of it; None: none did, or no record was kept.

        Raises:
            JournalError: the record is damaged.
        """
        ...

    def put_state(self, run: str, key: str, value: Any) -> None:
        """Keep a small JSON value for the controller.

        Raises:
            JournalError: not JSON.
        """
        ...

    def get_state(self, run: str, key: str) -> Any:
        """A value kept by `put_state`, or None."""
        ...

    def claim(self, run: str, holder: Holder, instead_of: Claimed | None = None) -> Claimed | None:
        """Claim a run for a program: from then on nobody else may lease, renew, ack, release, drop or restore its groups.

        A journal that was opened with this program's id may, all others are refused with `JournalError`, also the processes
        of a program that had the run before. The program that has it already claims it again, so that a controller may be
        started again; and one whose process is known to have ended loses it.

        Args:
            run: to carry out; it need not be there yet.
            holder: the program.
            instead_of: what an earlier call returned, to take the run from a program that gave no sign of life since.

        Returns:
            None when the run is this program's now; else whose it is.
        """
        ...

    def beat(self, run: str, holder: Holder) -> bool:
        """Say that the program which has claimed a run lives; False where it has lost it."""
        ...

    def end_claim(self, run: str, holder: Holder) -> None:
        """Give a run back; without effect where it is another's."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...

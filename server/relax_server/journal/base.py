"""The journal interface: a finished group is durable before anything is told of it, and is trained exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from relax_sdk.trajectory import Group, Trajectory


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
    """Dropped at a lease because they were too old."""

    @property
    def total(self) -> int:
        return self.ready + self.leased + self.acked + self.stale


@dataclass(frozen=True)
class TrajectoryRow:
    """A trajectory without its tokens, for lists."""

    id: str
    group_id: str
    env: str
    split: str
    task_index: int
    status: str
    reward: float
    version_min: int | None
    version_max: int | None
    n_tokens: int
    created_at: float
    rewards: dict[str, float] = field(default_factory=dict)


class Journal(Protocol):
    """Durable groups with leases.

    States of a group: `ready` → `leased` → `acked`; a lease that ends unacked returns to `ready`; a group older than
    allowed becomes `stale` at the lease. Methods are synchronous, safe from several threads and processes, and raise
    `JournalError` when the store cannot be read or written.
    """

    def commit(self, group: Group, run: str, split: str = "train") -> bool:
        """Make a group durable: rows, versions and tokens in one transaction; media files must be in the store already.

        Returns:
            False when a group of this id is already there: committing again changes nothing.
        """
        ...

    def lease(self, n: int, run: str, consumer: str, version: int, max_staleness: int, ttl: float) -> LeaseResult:
        """Lease the `n` oldest ready train groups of `run` whose staleness `version - version_min` is at most `max_staleness`.

        All or nothing: fewer than `n` leaves them ready. Expired leases count as ready. Groups that are too old are marked
        `stale` and counted even when nothing is leased.
        """
        ...

    def renew(self, run: str, consumer: str, ttl: float) -> int:
        """Extend all leases of a consumer; returns how many it still holds."""
        ...

    def ack(self, group_ids: Sequence[str], run: str, consumer: str, checkpoint: int) -> int:
        """The groups are inside checkpoint `checkpoint`. Repeating it changes nothing; returns how many are now acked.

        Raises:
            JournalError: a group is unknown, or is leased to another consumer.
        """
        ...

    def restore(self, run: str, consumer: str, checkpoint: int) -> int:
        """A trainer restarts from `checkpoint`: its leases, and acks that name a later checkpoint, return to `ready`.

        Returns:
            How many groups became ready again.
        """
        ...

    def counts(self, run: str) -> JournalCounts:
        """Train groups of a run by state."""
        ...

    def task_indices(self, run: str) -> list[int]:
        """Task indices of all committed train groups of a run, ascending; a restarted rollout plays those that are missing."""
        ...

    def groups(self, run: str, split: str = "train", limit: int = 100, newest_first: bool = True) -> list[Group]:
        """Whole groups, tokens included."""
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

    def put_state(self, run: str, key: str, value: Any) -> None:
        """Keep a small JSON value for the controller."""
        ...

    def get_state(self, run: str, key: str) -> Any:
        """A value kept by `put_state`, or None."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...

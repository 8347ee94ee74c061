"""The bus of one machine: leases straight from the journal."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from relax_sdk.errors import JournalError
from relax_sdk.trajectory import Group
from relax_server.bus.base import GroupBatch
from relax_server.journal.base import Journal, LeaseResult

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.01
"""Seconds between two looks into the journal; each costs a reader's query (about 0.1 ms) and no lock."""


class LocalBus:
    """`Bus` over a journal on the same machine.

    Every process opens its own journal and bus; only `renew` and `close` may be called while another thread is in `take`.
    """

    def __init__(self, journal: Journal, run: str, consumer: str = "trainer", ttl: float = 600.0) -> None:
        """Consume the train groups of `run`.

        Args:
            journal: where the groups are; whoever opened it closes it.
            run: the run's id.
            consumer: a name that the trainer keeps when it restarts, so that `restore` finds its leases.
            ttl: seconds a lease lasts without `renew`.
        """
        self.journal, self.run, self.consumer, self.ttl = journal, run, consumer, ttl
        self._held: set[str] = set()
        self._dropped = 0
        self._renewed = time.monotonic()
        self._lock = threading.Lock()  # keeps `_held` and the journal's leases in step
        self._closed = threading.Event()

    @property
    def fields(self) -> None:
        """See `Bus.fields`: there are none."""
        return

    def take(self, n: int, version: int, max_staleness: int, timeout: float) -> GroupBatch | None:
        """See `Bus.take`. The leases already held are renewed while it waits; groups dropped by a take that timed out are
        counted in the next batch.

        Raises:
            JournalError: the journal failed, the bus was closed, or a lease was lost to another consumer.
        """
        start = time.monotonic()
        pause = FIRST_PAUSE
        while True:
            found = self._lease(n, version, max_staleness)
            waited = time.monotonic() - start
            if found.leases:
                return self._batch([lease.group for lease in found.leases], version, waited)
            if waited >= timeout:
                return None
            self._closed.wait(min(pause, timeout - waited))
            pause = min(pause * 1.5, LONGEST_PAUSE)

    def ack(self, group_ids: list[str], checkpoint: int) -> None:
        """See `Bus.ack`.

        Raises:
            JournalError: a group is not held, for instance because its lease ended and another consumer took it.
        """
        with self._lock:
            self.journal.ack(group_ids, self.run, self.consumer, checkpoint)
            self._held.difference_update(group_ids)

    def restore(self, checkpoint: int) -> int:
        """See `Bus.restore`."""
        with self._lock:
            count = self.journal.restore(self.run, self.consumer, checkpoint)
            self._held.clear()
            return count

    def give_back(self, batch: GroupBatch) -> None:
        """See `Bus.give_back`; what the take dropped is counted in the next."""
        ids = [group.id for group in batch.groups]
        with self._lock:
            self.journal.release(ids, self.run, self.consumer)
            self._held.difference_update(ids)
            self._dropped += batch.dropped

    def forget(self, group_ids: Sequence[str]) -> None:
        """See `Bus.forget`: there is nothing to forget."""

    def release_ahead(self) -> None:
        """See `Bus.release_ahead`: nothing is leased ahead."""

    def set_aside(self, group_id: str, reason: str) -> None:
        """See `Bus.set_aside`."""
        with self._lock:
            self.journal.set_aside(group_id, self.run, self.consumer, reason)
            self._held.discard(group_id)

    def renew_when_due(self) -> None:
        """`renew` when a third of the lease time has passed since the last."""
        if time.monotonic() - self._renewed > self.ttl / 3:
            self.renew()

    def renew(self) -> None:
        """See `Bus.renew`.

        Raises:
            JournalError: a lease ended and another consumer took the group, so what was trained on it must be undone.
        """
        with self._lock:
            self._renewed = time.monotonic()
            if not self._held:
                return
            alive = self.journal.renew(self.run, self.consumer, self.ttl)
            if alive < len(self._held):
                raise JournalError(
                    f"{len(self._held) - alive} of {len(self._held)} groups leased by {self.consumer!r} were taken by another "
                    f"consumer after {self.ttl:g} s without renewal: go back to the last checkpoint and call restore"
                )

    def close(self) -> None:
        """See `Bus.close`; a `take` that waits in another thread raises."""
        self._closed.set()

    def _lease(self, n: int, version: int, max_staleness: int) -> LeaseResult:
        if self._closed.is_set():
            raise JournalError(f"the bus of run {self.run!r} is closed")
        self.renew_when_due()
        with self._lock:
            found = self._take(n, version, max_staleness)
            self._dropped += found.dropped
            return found

    def _take(self, n: int, version: int, max_staleness: int) -> LeaseResult:
        found = self.journal.lease(n, self.run, self.consumer, version, max_staleness, self.ttl)
        self._held.update(lease.group.id for lease in found.leases)
        return found

    def _batch(self, groups: list[Group], version: int, waited: float) -> GroupBatch:
        with self._lock:
            dropped, self._dropped = self._dropped, 0
            ready = self._ready()
        groups = in_order(groups)
        return GroupBatch(groups, version, staleness(groups, version), dropped, waited, ready)

    def _ready(self) -> int:
        """Groups that could be taken at once."""
        return self.journal.counts(self.run).ready


def in_order(groups: Sequence[Group]) -> list[Group]:
    """Groups by task, so that what is computed of them does not depend on which was played first."""
    return sorted(groups, key=lambda group: (group.task_index, group.id))


def staleness(groups: list[Group], version: int) -> list[int]:
    """How many versions behind `version` each trajectory is, by its oldest token.

    A trajectory without response tokens counts 0. Negative: it is ahead, because the trainer went back to a checkpoint.
    """
    oldest = (t.version_min for group in groups for t in group.trajectories)
    return [0 if v is None else version - v for v in oldest]

"""Leases taken before the trainer asks, so that other roles can work on groups while it still trains on others."""

from __future__ import annotations

from relax_sdk.trajectory import Group
from relax_server.bus.local import LocalBus
from relax_server.journal.base import Journal, Lease, LeaseResult


class LeasesAhead(LocalBus):
    """A `LocalBus` that may lease up to `ahead` groups more than were taken.

    What is leased ahead is served first, oldest first, by the same rule as everything else: staleness is looked at when the
    batch is taken, and a group that has become too old meanwhile is dropped in the journal and counted. A batch that was leased
    ahead as a whole does not ask the journal: what is too old there is dropped, and counted, with the next one. A trainer that
    dies leaves these leases like its others; `restore` makes them ready again. Until then nobody else gets them, so a run has
    only one consumer that leases ahead.

    Every method may be called while another thread is in another.
    """

    def __init__(self, journal: Journal, run: str, consumer: str = "trainer", ttl: float = 600.0, *, ahead: int = 0) -> None:
        """See `LocalBus`.

        Args:
            journal: where the groups are; whoever opened it closes it.
            run: the run's id.
            consumer: a name that the trainer keeps when it restarts.
            ttl: seconds a lease lasts without `renew`.
            ahead: groups leased ahead at most.
        """
        super().__init__(journal, run, consumer, ttl)
        self.ahead = ahead
        self._leases: list[Lease] = []  # those ahead, oldest first
        self._asked: tuple[int, int] | None = None  # version and max_staleness of the last take

    def lease_ahead(self) -> Group | None:
        """One more group; None when none is ready, as many as allowed are held, or nothing was asked for since `restore`.

        It is fresh enough for the batch that was asked for last.

        Raises:
            JournalError: the journal failed, or a lease was lost to another consumer.
        """
        self.renew_when_due()
        with self._lock:
            if self._closed.is_set() or self._asked is None or len(self._leases) >= self.ahead:
                return None
            found = self.journal.lease(1, self.run, self.consumer, *self._asked, self.ttl)
            self._dropped += found.dropped
            self._held.update(lease.group.id for lease in found.leases)
            self._leases += found.leases
            return found.leases[0].group if found.leases else None

    def holds(self, group_id: str) -> bool:
        """Whether the group is leased, ahead or not, and not acked."""
        with self._lock:
            return group_id in self._held

    def release_ahead(self) -> None:
        """Give back what is leased ahead, and lease no more until something is asked for again."""
        with self._lock:
            self._asked = None
            ids = [lease.group.id for lease in self._leases]
            self._leases = []
            if ids:
                self.journal.release(ids, self.run, self.consumer)
                self._held.difference_update(ids)

    def restore(self, checkpoint: int) -> int:
        """See `Bus.restore`."""
        with self._lock:
            self._asked, self._leases = None, []
        return super().restore(checkpoint)

    def _take(self, n: int, version: int, max_staleness: int) -> LeaseResult:
        self._asked = version, max_staleness
        dropped = self._drop_stale(version - max_staleness)
        if (missing := n - len(self._leases)) > 0:
            found = super()._take(missing, version, max_staleness)
            dropped += found.dropped
            if not found.leases:
                return LeaseResult([], dropped)
            self._leases += found.leases
        leases, self._leases = self._leases[:n], self._leases[n:]
        return LeaseResult(leases, dropped)

    def _drop_stale(self, oldest: int) -> int:
        """Drop what has become too old since it was leased; returns how many groups."""
        stale = [lease.group.id for lease in self._leases if lease.version_min < oldest]
        if not stale:
            return 0
        dropped = self.journal.drop(stale, self.run, self.consumer)
        self._held.difference_update(stale)
        self._leases = [lease for lease in self._leases if lease.version_min >= oldest]
        return dropped

    def _ready(self) -> int:
        return super()._ready() + len(self._leases)

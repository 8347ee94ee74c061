"""The bus over TransferQueue on Ray: the journal keeps the groups, the queue carries them and their fields between roles."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace

from relax_sdk.errors import JournalError
from relax_sdk.trajectory import Group
from relax_server.bus.ahead import LeasesAhead
from relax_server.bus.base import GroupBatch
from relax_server.bus.field_queue import GROUP, QUEUE_NAME, FieldQueue, first_fields, partition_name
from relax_server.bus.queue_actors import QueueActors, QueueFailed, obtain
from relax_server.bus.queue_client import CHECK_SECONDS, QueueClient
from relax_server.journal.base import Journal

FEED_AT_ONCE = 16
"""Groups whose puts are under way together, and that have to arrive within one `call_timeout`; also groups of a partition."""
AHEAD_PAUSE = 0.02
"""Seconds between two looks for a group to be fed ahead; each costs a reader's query (about 0.1 ms)."""
READY_PAUSE = 0.002


class TransferQueueBus(FieldQueue):
    """`Bus` for the trainer, and the feeder of what other roles take through a `FieldQueue`.

    A take leases from the journal, as the local bus does, puts every group into the queue by itself, and reads the batch from
    there. With `ahead`, a thread leases and feeds groups before they are asked for, so that other roles work on them while
    the trainer works on others; what a take serves and drops stays the same (see `LeasesAhead`).

    The queue is nothing to rely on: when it dies or hangs, in whatever call, the bus starts another and feeds the groups that
    are leased and not acked again. Only the journal decides what is served, so nothing is lost or served twice.

    A bus that starts the queue is its owner: it ends with the bus, and with its process. Other buses and roles join it.
    Only `renew` and `close` may be called while another thread is in another method.
    """

    def __init__(
        self,
        journal: Journal,
        run: str,
        consumer: str = "trainer",
        ttl: float = 600.0,
        *,
        address: str | None = None,
        name: str = QUEUE_NAME,
        ahead: int = 0,
        storage_units: int = 1,
        call_timeout: float = 30.0,
        repair_timeout: float = 120.0,
    ) -> None:
        """Consume the train groups of `run`.

        Args:
            journal: where the groups are; whoever opened it closes it.
            run: the run's id.
            consumer: a name that the trainer keeps when it restarts, so that `restore` finds its leases.
            ttl: seconds a lease lasts without `renew`.
            address: of the Ray cluster, if this process has not called `ray.init`; None starts one for this process.
            name: of the queue in the cluster; several runs may share one.
            ahead: groups leased and fed before they are asked for, at most; needs that no other consumer serves the run.
            storage_units: processes that hold the data, where the queue has to be started; they ask Ray for no CPU.
            call_timeout: seconds one request to the queue may take; a queue that takes longer counts as dead.
            repair_timeout: seconds to start or rebuild the queue.

        Raises:
            BusError: Ray or the queue cannot be reached or started.
        """
        self._local = LeasesAhead(journal, run, consumer, ttl, ahead=ahead)
        self.journal, self.consumer, self.storage_units = journal, consumer, storage_units
        super().__init__(run, address=address, name=name, call_timeout=call_timeout, repair_timeout=repair_timeout)
        self._actors: QueueActors | None = None
        self._mine: QueueActors | None = None
        self._places: dict[str, str] = {}  # group id → partition, of what is in the queue
        self._unfed: dict[str, Group | None] = {}  # what has to go there; None: the journal has it
        self._session, self._fed = uuid.uuid4().hex[:8], 0
        self._open: tuple[str, int] | None = None  # the partition that is being filled, and how many groups it has had
        self._feeder = threading.Thread(target=self._feed_ahead, name="bus feeder", daemon=True)
        self._feeder_failed: Exception | None = None
        try:
            self._call(self._drop_all)  # of a trainer that died in this one's place
        except BaseException:
            self.close()
            raise
        if ahead:
            self._feeder.start()

    # -------------------------------------------------------------------------------------------------------------- the bus

    def take(self, n: int, version: int, max_staleness: int, timeout: float) -> GroupBatch | None:
        """See `Bus.take`. Leases are renewed while it waits. A rebuild of the queue may add up to `repair_timeout` seconds.

        Raises:
            JournalError: the journal failed, the bus was closed, or a lease was lost to another consumer.
            BusError: the queue cannot be rebuilt, or the bus was closed meanwhile; the groups are ready again.
        """
        if self._feeder_failed is not None:
            raise self._feeder_failed
        batch = self._local.take(n, version, max_staleness, timeout)
        self._forget_dropped()
        if batch is None:
            return None
        leased = time.monotonic()
        try:
            groups = self._through_queue(batch.groups)
        except BaseException:
            self.forget([group.id for group in batch.groups])
            self._local.give_back(batch)
            raise
        return replace(batch, groups=groups, waited=batch.waited + time.monotonic() - leased)

    def give_back(self, batch: GroupBatch) -> None:
        """See `Bus.give_back`; the groups leave the queue.

        Raises:
            JournalError: the journal failed.
        """
        self.forget([group.id for group in batch.groups])
        self._local.give_back(batch)

    def set_aside(self, group_id: str, reason: str) -> None:
        """See `Bus.set_aside`; the group leaves the queue.

        Raises:
            JournalError: the journal failed.
        """
        self.forget([group_id])
        self._local.set_aside(group_id, reason)

    def ack(self, group_ids: list[str], checkpoint: int) -> None:
        """See `Bus.ack`; the groups leave the queue.

        Raises:
            JournalError: a group is not held, for instance because its lease ended and another consumer took it.
        """
        self._local.ack(group_ids, checkpoint)
        self.forget(group_ids)

    @property
    def fields(self) -> FieldQueue:
        """See `Bus.fields`: the queue that groups come through."""
        return self

    def forget(self, group_ids: Sequence[str]) -> None:
        """See `Bus.forget`: the groups leave the queue, which this keeps small between checkpoints."""
        with self._lock:
            places = {id: self._places.pop(id) for id in group_ids if id in self._places}
            for id in group_ids:
                self._unfed.pop(id, None)
            left = set(self._places.values())
            try:
                for partition in dict.fromkeys(places.values()):
                    if self._open is not None and partition == self._open[0] and partition not in left:
                        self._open = None  # a partition is not used again
                    if self._client is not None and partition not in left:
                        self._client.drop(partition)
                    elif self._client is not None:
                        self._client.clear(partition, [id for id in places if places[id] == partition])
            except QueueFailed:
                self._leave()  # what was to go is gone; the next call rebuilds

    def restore(self, checkpoint: int) -> int:
        """See `Bus.restore`; the queue holds nothing of this consumer afterwards.

        Raises:
            JournalError: the journal failed.
            BusError: the queue cannot be rebuilt.
        """
        count = self._local.restore(checkpoint)
        with self._lock:
            self._places, self._unfed, self._open = {}, {}, None
        self._call(self._drop_all)
        return count

    def release_ahead(self) -> None:
        """See `Bus.release_ahead`.

        Raises:
            JournalError: the journal failed.
        """
        self._local.release_ahead()
        self._forget_dropped()

    def renew(self) -> None:
        """See `Bus.renew`.

        Raises:
            JournalError: a lease ended and another consumer took the group, so what was trained on it must be undone.
        """
        self._local.renew()

    def close(self) -> None:
        """See `Bus.close`; a `take` that waits in another thread raises. The queue ends if this bus started it."""
        with contextlib.suppress(JournalError):  # a journal that cannot be written any more: `restore` does it
            self.release_ahead()
        self._local.close()
        self._closed.set()
        with self._lock:
            if self._mine is not None:
                self._mine.stop()
            else:
                self.forget(list(self._places))
            super().close()

    # ------------------------------------------------------------------------------------------------------------- feeding

    def _feed_ahead(self) -> None:
        """Lease and feed groups as they become ready, and rebuild a dead queue, until the bus is closed; runs in a thread."""
        looked = time.monotonic()
        while not self._closed.is_set():
            try:
                group = self._local.lease_ahead()
                if group is None:
                    self._closed.wait(AHEAD_PAUSE)
                    if time.monotonic() - looked < CHECK_SECONDS:
                        continue
                else:
                    with self._lock:
                        if group.id not in self._places and self._local.holds(group.id):  # a take may have been quicker
                            self._unfed[group.id] = group
                self._call(lambda client: None)  # it looks after the queue, and feeds what is not in it
                looked = time.monotonic()
            except Exception as error:
                self._feeder_failed = error  # the next take raises it
                return

    def _forget_dropped(self) -> None:
        """What was leased ahead and given up leaves the queue."""
        with self._lock:
            self.forget([id for id in (*self._places, *self._unfed) if not self._local.holds(id)])

    def _through_queue(self, groups: list[Group]) -> list[Group]:
        ids = [group.id for group in groups]
        with self._lock:
            self._unfed |= {group.id: group for group in groups if group.id not in self._places}
        return self._call(lambda client: self._arrived(client, ids))

    def _arrived(self, client: QueueClient, ids: list[str]) -> list[Group]:
        """The groups as the queue hands them out."""
        end = time.monotonic() + self.call_timeout
        while time.monotonic() < end:
            rows = self._get(client, ids, [GROUP])
            if rows is not None:
                return [row.fields[GROUP] for row in rows]
            if self._closed.wait(READY_PAUSE):
                break
        raise QueueFailed(f"groups that were put did not become ready within {self.call_timeout:g} s")

    def _locate(self, client: QueueClient, group_ids: Sequence[str]) -> dict[str, str]:
        return {id: self._places[id] for id in group_ids if id in self._places}

    def _joined(self, timeout: float) -> QueueClient:
        """The connection to a queue that holds everything that is leased and not forgotten."""
        self._local.renew_when_due()
        if self._client is None:
            failed, self._actors = self._actors, None
            self._actors, started = obtain(self.name, self.storage_units, failed, timeout)
            self._mine = self._actors if started else None
            self._connect(self._actors)
        assert self._client is not None
        self._client.check()
        self._feed(self._client)
        return self._client

    def _feed(self, client: QueueClient) -> None:
        """Put what is not in the queue, one put a group, into partitions that are filled once and never used again."""
        while self._unfed:
            if self._open is None or self._open[1] >= FEED_AT_ONCE:
                self._fed += 1
                self._open = partition_name(self.run, self.consumer, f"{self._session}-{self._fed}"), 0
            partition, count = self._open
            part = list(self._unfed)[: FEED_AT_ONCE - count]
            unread = [id for id in part if self._unfed[id] is None]
            lost = dict(zip(unread, self.journal.fetch(unread), strict=True))
            self._open = partition, count + len(part)  # also if the put fails: what it left behind is not to be met again
            client.put(partition, {id: first_fields(self._unfed[id] or lost[id]) for id in part})
            for id in part:
                del self._unfed[id]
                self._places[id] = partition

    def _drop_all(self, client: QueueClient) -> None:
        prefix = partition_name(self.run, self.consumer, "")
        for partition in client.partitions():
            if partition.startswith(prefix):
                client.drop(partition)

    def _leave(self) -> None:
        """Leave a queue that failed: all it held has to be fed to the next."""
        self._unfed = dict.fromkeys(self._places) | self._unfed
        self._places, self._open = {}, None
        super()._leave()

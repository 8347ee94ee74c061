"""Fields of groups on their way between training roles: what a role other than the trainer holds of the bus."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np

from relax_sdk.errors import BusError, ConfigError, JournalError
from relax_sdk.trajectory import Group, decode_group, encode_group
from relax_server.bus.cluster import join_cluster, own_cluster, ray
from relax_server.bus.queue_actors import QueueActors, QueueFailed, find
from relax_server.bus.queue_client import ID, QueueClient

T = TypeVar("T")

GROUP = "group"
"""The field every row has from the start: the whole `Group`, media as references into the media folder."""
VERSION_MIN, TRAJECTORIES, TOKENS = "version_min", "n_trajectories", "n_tokens"
"""Fields every row has from the start, integers: oldest weight version, trajectories, response tokens."""
FIRST_FIELDS = (GROUP, VERSION_MIN, TRAJECTORIES, TOKENS, ID)

QUEUE_NAME = "relax-queue"
FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.05
"""Seconds between two looks for fields; each costs the controller one or two requests of about 1 ms."""
REPAIR_PAUSE = 0.25


@dataclass(frozen=True)
class Row:
    """Some fields of one group."""

    group_id: str
    fields: dict[str, Any]
    """`"group"` is a `Group`, the other first fields are integers; what roles put are arrays."""


class FieldQueue:
    """Takes and puts fields of a run's groups; in as many processes as there are roles.

    A row is there from the moment the bus has fed its group until it is acked or forgotten. When the queue dies, the bus
    starts another and feeds the groups that are not acked; their fields are put again by the roles, which are served the
    groups again. So a role may see a group twice and does the same work twice; the trainer does not.
    """

    def __init__(
        self,
        run: str,
        *,
        address: str | None = None,
        name: str = QUEUE_NAME,
        call_timeout: float = 30.0,
        repair_timeout: float = 120.0,
    ) -> None:
        """Join the queue as soon as something is asked of it.

        Args:
            run: the run's id.
            address: of the Ray cluster, if this process has not called `ray.init`; None starts one for this process.
            name: of the queue in the cluster; several runs may share one.
            call_timeout: seconds one request to the queue may take; a queue that takes longer counts as dead.
            repair_timeout: seconds that a call waits for a queue to be there, or there again.

        Raises:
            BusError: Ray cannot be reached or started.
        """
        self.run, self.name = run, name
        self.call_timeout, self.repair_timeout = call_timeout, repair_timeout
        self._owns_cluster = join_cluster(address)
        self._client: QueueClient | None = None
        self._seen: dict[str, str] = {}  # group id → the partition it was last in
        self._had: set[str] = set()  # tasks that rows were taken for
        self._lock = threading.RLock()  # one call at a time, and `close` in between
        self._closed = threading.Event()

    def take_fields(self, names: Sequence[str], n: int, task: str, timeout: float) -> list[Row]:
        """Wait for groups that have all of these fields and that were not taken for `task` yet.

        Args:
            names: of the fields.
            n: how many groups at most.
            task: what they are taken for, such as `"reference"`; processes that give the same name share the work.
            timeout: seconds to wait for the first.

        Returns:
            One to `n` rows, oldest first; none when `timeout` passed first.

        Raises:
            BusError: there has been no queue for `repair_timeout` seconds, or this end of it is closed.
        """
        return self._wait(lambda client: self._fetch(client, names, n, task), timeout) or []

    def get_fields(self, group_ids: Sequence[str], names: Sequence[str], timeout: float) -> list[Row] | None:
        """Wait until these groups have these fields; None when `timeout` passed first, or one is not in the queue any more.

        Nothing counts as taken. Rows are in the order of `group_ids`.

        Raises:
            BusError: as in `take_fields`.
        """
        return self._wait(lambda client: self._get(client, group_ids, names), timeout)

    def put_fields(self, group_ids: Sequence[str], fields: Mapping[str, Sequence[Any]]) -> list[str]:
        """Add fields to groups, or replace them.

        Args:
            group_ids: of groups in the queue.
            fields: by name one value for each group; a value is an array, or what `numpy.asarray` makes one of.

        Returns:
            The groups that are not in the queue any more, or not yet again: their values are dropped. Nobody needs them, or
            they will be taken again.

        Raises:
            ConfigError: a field has another number of values than there are groups, values that are not arrays, or the name
                of a first field.
            BusError: as in `take_fields`.
        """
        rows = _rows(group_ids, fields)
        return self._call(lambda client: self._put(client, rows)) if rows else []

    def retake(self, task: str) -> None:
        """Hand out for `task` all groups in the queue again; for a role that starts, since another may have died in its place.

        Raises:
            BusError: as in `take_fields`.
        """
        self._call(lambda client: self._reset(client, [task]))

    @property
    def cluster(self) -> tuple[str, dict[str, str]] | None:
        """The Ray cluster that was started for this process, see `own_cluster`; None: it is part of another."""
        return own_cluster() if self._owns_cluster else None

    def close(self) -> None:
        """Leave the queue; a call that waits in another thread raises. A cluster that was started for this ends."""
        self._closed.set()
        with self._lock:
            self._leave()
            if self._owns_cluster:
                self._owns_cluster = False
                ray.shutdown()

    # --------------------------------------------------------------------------------------------------- one look or change

    def _fetch(self, client: QueueClient, names: Sequence[str], n: int, task: str) -> list[Row] | None:
        self._had.add(task)
        rows: list[Row] = []
        for partition in self._partitions(client):
            found = client.fetch(partition, names, n - len(rows), task)
            self._seen |= dict.fromkeys(found, partition)
            rows += [_row(id, found[id], names) for id in found]
            if len(rows) >= n:
                break
        return rows or None

    def _get(self, client: QueueClient, group_ids: Sequence[str], names: Sequence[str]) -> list[Row] | None:
        found: dict[str, dict[str, Any]] = {}
        places = self._locate(client, group_ids)
        if len(places) < len(set(group_ids)):
            return None
        for partition, ids in _by_partition(places):
            part = client.get(partition, ids, names)
            if part is None:
                self._seen = {}
                return None
            found |= part
        if set(found) != set(group_ids):
            raise QueueFailed(f"the queue answered with groups {sorted(found)} for {sorted(group_ids)}")
        return [_row(id, found[id], names) for id in group_ids]

    def _put(self, client: QueueClient, rows: dict[str, dict[str, Any]]) -> list[str]:
        gone = set(rows)
        for partition, ids in _by_partition(self._locate(client, list(rows))):
            gone -= set(ids) - client.update(partition, {id: rows[id] for id in ids})
        if gone:
            self._seen = {}
        return [id for id in rows if id in gone]

    def _reset(self, client: QueueClient, tasks: Iterable[str]) -> None:
        for partition in self._partitions(client):
            for task in tasks:
                client.reset(partition, task)

    def _locate(self, client: QueueClient, group_ids: Sequence[str]) -> dict[str, str]:
        """The partitions of those groups that are in the queue."""
        if not set(group_ids) <= set(self._seen):
            prefix = _prefix(self.run)
            self._seen = {id: at for at, ids in client.keys().items() if at.startswith(prefix) for id in ids}
        return {id: self._seen[id] for id in group_ids if id in self._seen}

    def _partitions(self, client: QueueClient) -> list[str]:
        return [partition for partition in client.partitions() if partition.startswith(_prefix(self.run))]

    # ------------------------------------------------------------------------------------------------- waiting and repairing

    def _wait(self, look: Callable[[QueueClient], T | None], timeout: float) -> T | None:
        end, pause = time.monotonic() + timeout, FIRST_PAUSE
        while True:
            found = self._call(look)
            left = end - time.monotonic()
            if found is not None or left <= 0:
                return found
            self._closed.wait(min(pause, left))
            pause = min(1.5 * pause, LONGEST_PAUSE)

    def _call(self, work: Callable[[QueueClient], T]) -> T:
        """Do `work`, again with another queue whenever this one fails.

        Raises:
            BusError: it did not succeed within `repair_timeout` seconds, or the bus is closed.
        """
        end = time.monotonic() + self.repair_timeout
        while True:
            with self._lock:
                if self._closed.is_set():
                    raise BusError(f"the bus of run {self.run!r} is closed")
                try:
                    return work(self._joined(end - time.monotonic()))
                except QueueFailed as error:
                    self._leave()
                    if time.monotonic() > end:
                        raise BusError(
                            f"the queue {self.name!r} of run {self.run!r} was not to be had for {self.repair_timeout:g} s "
                            f"({error}); the journal still holds its groups: see whether Ray is well, and start the role again"
                        ) from error
            self._closed.wait(REPAIR_PAUSE)

    def _joined(self, timeout: float) -> QueueClient:
        """The connection, or a new one."""
        if self._client is None:
            actors = find(self.name, timeout)
            if actors is None:
                raise QueueFailed("no bus has started one yet, or it is being rebuilt")
            self._connect(actors)
        assert self._client is not None
        self._client.check()
        return self._client

    def _connect(self, actors: QueueActors) -> None:
        self._client = QueueClient(actors, self.call_timeout)
        self._reset(self._client, self._had)  # what was handed to this role just before the failure may not have arrived

    def _leave(self) -> None:
        self._seen = {}
        if self._client is not None:
            self._client.close()
            self._client = None


def partition_name(run: str, consumer: str, tail: str) -> str:
    """A partition of a consumer of a run; an empty `tail` gives what the names of all of them begin with."""
    return f"{_prefix(run)}{quote(consumer, safe='')}/{tail}"


def first_fields(group: Group) -> dict[str, Any]:
    """What the row of a group holds when it is fed."""
    return {
        GROUP: np.frombuffer(encode_group(group), np.uint8),
        VERSION_MIN: group.version_min,
        TRAJECTORIES: len(group.trajectories),
        TOKENS: sum(t.n_response_tokens for t in group.trajectories),
    }


def _prefix(run: str) -> str:
    return f"{quote(run, safe='')}/"


def _by_partition(places: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    parts: dict[str, list[str]] = {}
    for id, partition in places.items():
        parts.setdefault(partition, []).append(id)
    return list(parts.items())


def _row(group_id: str, values: Mapping[str, Any], names: Sequence[str]) -> Row:
    return Row(group_id, {name: _decoded(name, values[name]) for name in names})


def _decoded(name: str, value: Any) -> Any:
    if name != GROUP:
        return value.copy() if isinstance(value, np.ndarray) else value  # what arrives is a read-only view of the message
    try:
        return decode_group(value)
    except JournalError as error:
        raise QueueFailed(f"a group arrived damaged: {error}") from error


def _rows(group_ids: Sequence[str], fields: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Values by group and field.

    Raises:
        ConfigError: see `put_fields`.
    """
    rows: dict[str, dict[str, Any]] = {id: {} for id in group_ids}
    for name, values in fields.items():
        if name in FIRST_FIELDS:
            raise ConfigError(f"field {name!r} belongs to the bus; allowed: any other name than {', '.join(FIRST_FIELDS)}")
        if len(values) != len(group_ids):
            raise ConfigError(f"field {name!r} has {len(values)} values for {len(group_ids)} groups; give one for each")
        for id, value in zip(group_ids, values, strict=True):
            array = np.atleast_1d(np.asarray(value))
            if array.dtype.hasobject:
                raise ConfigError(f"field {name!r} of group {id!r} is a {type(value).__name__}; give an array of numbers")
            rows[id][name] = array
    return rows if fields else {}

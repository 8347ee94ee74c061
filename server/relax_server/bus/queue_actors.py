"""TransferQueue's controller and storage units as Ray actors: started, found by name, and ended, always within a time limit.

`transfer_queue.init` is not used. It reserves a CPU for each actor and waits without end where there are too few, allows one
queue for each cluster and process, and never starts a second one. The actors are the same; only the controller differs from
upstream's, in that it does not use an index again.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from transfer_queue.controller import PartitionIndexManager, TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit

from relax_server.bus.cluster import NAMESPACE

LOOK_SECONDS = 0.1


Actor = Any
"""A handle of a Ray actor; its methods are known only to the actor's class."""

START_SECONDS = 60.0
"""A queue that somebody else starts may take so long before it counts as dead."""


class QueueFailed(Exception):
    """The queue did not do what was asked: it died, hangs, or answered wrongly. Whoever sees it looks for another queue."""


class OneUseIndexes(PartitionIndexManager):
    """Row indexes that are never given out twice.

    Upstream gives the indexes of cleared rows to the next ones, so that a late writer, which still has the old index,
    overwrites the row of somebody else.
    """

    def release_partition(self, partition_id: str) -> list[int]:
        """Forget the indexes of a partition; returns them."""
        indexes: list[int] = list(self.partition_to_indexes.pop(partition_id, set()))
        self.allocated_indexes.difference_update(indexes)
        return indexes

    def release_indexes(self, partition_id: str, indexes_to_release: list[int]) -> None:
        """Forget some indexes of a partition."""
        self.partition_to_indexes[partition_id].difference_update(indexes_to_release)
        self.allocated_indexes.difference_update(indexes_to_release)


_remote: Any = TransferQueueController


class Controller(_remote.__ray_actor_class__):
    """Upstream's controller, polling, with indexes that are used once."""

    def __init__(self) -> None:
        super().__init__(polling_mode=True)
        self.index_manager = OneUseIndexes()


@dataclass(frozen=True)
class QueueActors:
    """One running queue."""

    token: str
    """Tells it from earlier and later ones of the same name."""
    controller: Actor
    storages: list[Actor]
    addresses: list[Any]
    """TransferQueue's `ZMQServerInfo` of the controller and then of each storage unit."""

    def check(self, timeout: float) -> None:
        """Ask every actor whether it lives.

        Raises:
            QueueFailed: one is dead, which is known at once, or does not answer within `timeout` seconds.
        """
        _in_cluster()
        try:
            asked: list[Any] = [actor.get_zmq_server_info.remote() for actor in (self.controller, *self.storages)]
            ray.get(asked, timeout=max(timeout, 0.0))
        except RayError as error:
            raise QueueFailed(f"an actor of the queue is dead or hangs: {error}") from error

    def stop(self) -> None:
        """End all actors; those that are dead already do no harm."""
        if not ray.is_initialized():
            return  # they ended with the cluster, or their owner
        for actor in (self.controller, *self.storages):
            _kill(actor)


def obtain(name: str, units: int, failed: QueueActors | None, timeout: float) -> tuple[QueueActors, bool]:
    """The queue called `name`, and whether it was started here; `failed` is ended and, unless somebody did so, replaced.

    Raises:
        QueueFailed: there is none after `timeout` seconds.
    """
    end = time.monotonic() + timeout
    if failed is not None:
        failed.stop()
    while (left := end - time.monotonic()) > 0:
        controller = _named(name)
        if controller is None:
            try:
                return start(name, units, left), True
            except NameTaken:
                continue
        if failed is None or controller != failed.controller:
            found = _attach(controller, min(left, START_SECONDS))
            if found is not None:
                return found, False
        _kill(controller)
        time.sleep(LOOK_SECONDS)
    raise QueueFailed(f"no queue could be started within {timeout:.0f} s: the name {name!r} stayed taken")


def find(name: str, timeout: float) -> QueueActors | None:
    """The running queue called `name`, waiting for one that is being started; None: there is none, or it does not answer."""
    controller = _named(name)
    return None if controller is None else _attach(controller, timeout)


def _in_cluster() -> None:
    """Ray starts a cluster of its own when it is asked for something without one."""
    if not ray.is_initialized():
        raise QueueFailed("this process has left its Ray cluster")


def _named(name: str) -> Actor | None:
    _in_cluster()
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
    except (RayError, ConnectionError, RuntimeError) as error:
        raise QueueFailed(f"the Ray cluster does not answer: {error}") from error


def _attach(controller: Actor, timeout: float) -> QueueActors | None:
    end = time.monotonic() + timeout
    try:
        while (left := end - time.monotonic()) > 0:
            config: Any = ray.get(controller.get_config.remote(), timeout=left)
            if config is not None:
                return QueueActors(config["token"], controller, config["storages"], config["addresses"])
            time.sleep(LOOK_SECONDS)
    except RayError:
        pass
    return None


class NameTaken(Exception):
    """Another process starts, or has started, a queue of this name."""


def start(name: str, units: int, timeout: float) -> QueueActors:
    """Start a queue; it ends with the process that started it.

    Raises:
        NameTaken: there is one already.
        QueueFailed: it was not there after `timeout` seconds.
    """
    try:
        controller = ray.remote(num_cpus=0)(Controller).options(name=name, namespace=NAMESPACE).remote()
    except ValueError as error:
        raise NameTaken(name) from error
    storages: list[Actor] = [SimpleStorageUnit.options(num_cpus=0).remote(config={}) for _ in range(units)]
    try:
        asked: list[Any] = [actor.get_zmq_server_info.remote() for actor in (controller, *storages)]
        addresses = ray.get(asked, timeout=max(timeout, 0.0))
        token = uuid.uuid4().hex[:12]
        config = {"token": token, "storages": storages, "addresses": addresses}
        ray.get(controller.store_config.remote(config), timeout=max(timeout, 0.0))
    except RayError as error:
        for actor in (controller, *storages):
            _kill(actor)
        raise QueueFailed(f"the queue {name!r} was not up within {timeout:.0f} s: {error}") from error
    return QueueActors(token, controller, storages, addresses)


def _kill(actor: Actor) -> None:
    with contextlib.suppress(ValueError, RayError):
        ray.kill(actor, no_restart=True)

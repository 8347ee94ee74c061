"""A Ray cluster and a queue in it for the whole test session; a machine without the `ray` extra skips what needs them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

QUEUE = "test-queue"


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Ray in this process, as the driver."""
    ray = pytest.importorskip("ray", reason="the package ray is not installed (pip install 'relax-gym[ray]')")
    pytest.importorskip("transfer_queue", reason="the package TransferQueue is not installed (pip install 'relax-gym[ray]')")
    from relax_server.bus.cluster import join_cluster

    join_cluster(None)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def shared_queue(ray_cluster: None) -> Iterator[str]:
    """The name of a queue that is there already, so that buses join it instead of starting one each."""
    from relax_server.bus.queue_actors import obtain

    kept.append(obtain(QUEUE, 1, None, 120.0)[0])
    yield QUEUE
    import ray

    if ray.is_initialized():  # other tests may have left this cluster, and it has ended with what was in it
        for actors in kept:
            actors.stop()


kept: list[Any] = []


def close_bus(bus: Any) -> None:
    """Close a bus; a queue that it started serves the next tests."""
    if bus._mine is not None:
        kept.append(bus._mine)
        bus._mine = None
    bus.close()


def pid_of(actor: Any) -> int:
    """The process of a Ray actor."""
    import ray

    found: Any = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60.0)
    return found


def stop_process(pid: int) -> None:
    """SIGSTOP, and wait until every thread stands still: on a busy machine they still answer for some milliseconds."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 30.0
    while set(_thread_states(pid)) != {"T"}:
        assert time.monotonic() < end, f"process {pid} does not stop"
        time.sleep(0.01)


def _thread_states(pid: int) -> list[str]:
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return states


def end_process(pid: int) -> None:
    """SIGKILL, and wait until the process is gone."""
    try:
        process = psutil.Process(pid)
        process.send_signal(signal.SIGKILL)
        process.wait(30.0)
    except psutil.NoSuchProcess:
        pass

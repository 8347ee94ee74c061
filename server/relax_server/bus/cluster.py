"""The Ray cluster that a bus uses: the one this process is part of, one to be joined, or one of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from pathlib import Path
from typing import Any

import psutil

from relax_sdk.errors import BusError, ConfigError

# TransferQueue reads these when it is imported.
os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")  # it warns at every look at what is not there yet
os.environ.setdefault("TQ_STORAGE_HANDSHAKE_MAX_RETRIES", "10")  # seconds; 3 are few on a busy machine
try:
    import ray
    import transfer_queue  # noqa: F401
except ImportError as error:
    raise ConfigError(
        f"the transfer_queue bus needs Ray and TransferQueue ({error}): pip install 'relax-gym[ray]', or use the local bus"
    ) from error

NAMESPACE = "relax"
"""Ray namespace of all named actors of ours."""

OBJECT_STORE_BYTES = 128 * 2**20
"""Size of Ray's object store in a cluster of our own; TransferQueue moves its data over sockets, so it stays almost empty."""

STARTS = 3
"""How often a cluster is started before it is given up: Ray waits 30 s for its node, which a busy machine may not keep."""

logger = logging.getLogger(__name__)


def start_cluster(**settings: Any) -> None:
    """Start a Ray cluster for this process, as `ray.init("local", **settings)`; begun anew where its node comes up too late.

    Raises:
        Exception: Ray's own, which is a plain one where the node of the last start came up too late too.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The cluster answers only to those who show a token, which Ray would write into the home folder.
    if not (os.environ.get("RAY_AUTH_TOKEN_PATH") or (Path.home() / ".ray" / "auth_token").exists()):
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    for left in reversed(range(STARTS)):
        before = {child.pid for child in psutil.Process().children()}
        try:
            ray.init(address="local", include_dashboard=False, **settings)
            return
        except Exception as error:
            _end_node(before)
            if "timed out during startup" not in str(error) or not left:
                raise
            logger.warning("the Ray cluster did not come up in time; it is started again")


def _end_node(before: set[int]) -> None:
    """Kill what a start that failed has left: children of this process that were not there before it and are Ray's."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.pid not in before and any("/ray/" in part for part in child.cmdline()):
                child.kill()
                child.wait(10)


def join_cluster(address: str | None) -> bool:
    """Make Ray usable in this process.

    A process that has called `ray.init`, or runs inside a Ray actor, keeps the cluster it has. Otherwise `address` is joined
    or, when it is None, a cluster of this machine is started for this process.

    Returns:
        Whether a cluster was started: whoever asked for it shuts it down.

    Raises:
        BusError: there is no cluster at `address`, or none could be started.
    """
    if ray.is_initialized():
        return False
    try:
        if address is not None:
            ray.init(address=address, log_to_driver=False)
            return False
        start_cluster(object_store_memory=OBJECT_STORE_BYTES, log_to_driver=False)
        return True
    except Exception as error:  # Ray raises a plain one where a node does not come up in time
        what = "start a Ray cluster on this machine" if address is None else f"join the Ray cluster at {address!r}"
        raise BusError(f"cannot {what}: {error}") from error


def own_cluster() -> tuple[str, dict[str, str]]:
    """Address of this process's cluster, and the environment variables that those who join it need."""
    known = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}
    return ray.get_runtime_context().gcs_address, known

"""The entry point of a role's process: `python -m relax_server.roles.child ROLE FD`."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

from relax_sdk.errors import CheckpointError, ConfigError, DiskFull, RegistryError, RunError
from relax_server.roles import shared_memory
from relax_server.roles.channel import Channel, Outlet
from relax_server.roles.full_disk import full_disk
from relax_server.roles.messages import Failed

FATAL = (ConfigError, RegistryError, CheckpointError, DiskFull, RunError)
"""Errors that would come back after a restart."""


def main() -> None:
    """Run one role until it is stopped, fails, or its parent is gone."""
    role, fd = sys.argv[1], int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    channel = Channel(fd)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    first = channel.receive()

    leaving = threading.Lock()

    def parent_gone() -> None:
        leaving.acquire()  # both threads may notice; the second one waits here for the end
        weights = getattr(first, "weights", None)
        if isinstance(weights, Path):  # the policy's: nobody else is left to give the shared memory back
            shared_memory.remove(weights)
        os._exit(0)

    channel.listen(inbox.put, on_close=parent_gone)
    try:
        well = run_role(role, channel, inbox, first)
    except OSError:
        parent_gone()
    else:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(0 if well else 1)  # threads of abandoned environments must not keep the process alive


def run_role(role: str, channel: Outlet, inbox: queue.SimpleQueue[Any], first: Any) -> bool:
    """Run a role to its end; an error is told as `Failed`.

    Returns:
        Whether it ended well.

    Raises:
        OSError: nobody is left to be told of an error.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        if role == "rollout":
            from relax_server.roles.rollout import run_rollout

            run_rollout(channel, inbox, first)
        elif role.partition("-")[0] == "policy":  # or another rank of it
            from relax_server.roles.policy import run_policy

            run_policy(channel, inbox, first)
        elif role == "advantages":
            from relax_server.roles.advantages import run_advantages

            run_advantages(channel, inbox, first)
        elif role == "reference":
            from relax_server.roles.reference import run_reference

            run_reference(channel, inbox, first)
        elif role == "controller":
            from relax_server.roles.ray.controller import run_controller

            run_controller(channel, inbox, first)
        else:
            raise ConfigError(f"unknown role {role!r}")
    except Exception as error:
        with contextlib.suppress(OSError):  # the disk of the log may be full, which is what is to be told
            traceback.print_exc()
        places = [getattr(first, name, None) for name in ("folder", "weights", "features")]
        full = full_disk(error, tuple(place for place in places if isinstance(place, Path)))
        fatal = full is not None or isinstance(error, FATAL)
        channel.send(Failed(full or f"{type(error).__name__}: {error}", fatal, role))
        return False
    return True


if __name__ == "__main__":
    main()

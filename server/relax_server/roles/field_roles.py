"""The roles that compute fields, as the controller sees them: started once there is a queue, watched, started again alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from relax_sdk.runtime import Job
from relax_server.loading_time import seconds_to_load
from relax_server.roles.field_worker import REFERENCE_ROLE, field_roles
from relax_server.roles.messages import Beat, Cluster, Died, StartFields
from relax_server.roles.placement import Placement, Role
from relax_server.roles.process import STOP_SECONDS
from relax_server.roles.record import Warns
from relax_server.roles.restarts import Restarts

START_SECONDS = 180.0
"""Seconds for a role to load what it needs and say that it is well."""
SILENCE_SECONDS = 60.0
"""A role that waits for rows and says nothing for so long is started again."""


class FieldRoles:
    """None, one or two roles of a run.

    Args:
        job: the run.
        placement: starts them.
        restarts: counts how often.
        model_path: of the model that the run trains.
        features: folder in shared memory where media features are exchanged.
        on_message: gets what concerns the controller: `Died` and `Failed`.
        warn: says what happened to them.
    """

    def __init__(
        self,
        job: Job,
        placement: Placement,
        restarts: Restarts,
        model_path: Path,
        features: Path | None,
        on_message: Callable[[Any], None],
        warn: Warns,
    ) -> None:
        self._job, self._restarts, self._on_message, self._warn = job, restarts, on_message, warn
        self._model_path, self._features = model_path, features
        self._roles: dict[str, Role] = {}
        for name in field_roles(job.config):
            threads = job.config.training.threads if name == REFERENCE_ROLE else 1
            self._roles[name] = placement.role(name, job.folder, partial(self._hear, name), threads)
        self._cluster: Cluster | None = None
        self._silent_until: dict[str, float] = {}
        """When a role that has said nothing else counts as hanging."""

    def __contains__(self, name: object) -> bool:
        return name in self._roles

    async def follow(self, cluster: Cluster | None) -> None:
        """Start those that do not run.

        Args:
            cluster: that the queue is in, if the trainer has started it; None: the one that everything is in.
        """
        self._cluster = cluster
        for name, role in self._roles.items():
            if not role.alive():
                await self._start(name)

    async def leave(self) -> None:
        """The trainer is gone. What was in its own Ray cluster has nothing to work on, and ends."""
        if self._cluster is not None:
            for role in self._roles.values():
                role.kill()
            await self.stop()

    async def restart(self, message: Died) -> None:
        """Start a role again; it computes what is in the queue once more.

        Raises:
            RunError: it died too often.
        """
        role = self._roles[message.role]
        if message.generation != role.generation:
            return  # the end of an earlier one
        self._restarts.count(message.role, f"the last time {message.how}; end of {message.log}:\n{await role.log_tail()}")
        self._warn(f"the {message.role} process ended ({message.how}); starting it again", "restart", message.role)
        await self._start(message.role)

    @property
    def all(self) -> dict[str, Role]:
        """By name."""
        return self._roles

    def look_for_hangs(self, now: float) -> None:
        """Kill what was not heard of for too long; its end is then an event like any other."""
        for name, until in list(self._silent_until.items()):
            if now > until and self._roles[name].alive():
                self._warn(f"the {name} process said nothing for too long and is killed", "alarm", name)
                del self._silent_until[name]
                self._roles[name].kill()

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """End them.

        Args:
            seconds: for each to end by itself.
        """
        self._silent_until = {}
        await asyncio.gather(*(role.stop(seconds) for role in self._roles.values()))

    async def _start(self, name: str) -> None:
        job = self._job
        first = StartFields(job.config, job.folder.name, job.folder, self._model_path, self._cluster, self._features)
        self._silent_until[name] = time.monotonic() + seconds_to_load(START_SECONDS, self._model_path)
        await self._roles[name].start(first)

    def _hear(self, name: str, message: Any) -> None:
        if isinstance(message, Beat):
            self._silent_until[name] = time.monotonic() + (
                SILENCE_SECONDS if message.waiting else self._job.config.training.step_timeout
            )
        else:
            self._on_message(message)

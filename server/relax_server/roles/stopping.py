"""A run that is asked to stop: what is waited for, and what is cut short."""

from __future__ import annotations

import asyncio
from typing import Any

from relax_server.roles.messages import Stop
from relax_server.roles.placement import Role
from relax_server.roles.process import STOP_SECONDS

ROLE_SECONDS = 3.0
"""Seconds for a role to end when the run is stopped by hand; it holds nothing that is not durable."""

REST_SECONDS = 2.0
"""Seconds for what the controller is doing, once the trainer's last checkpoint is there."""


class Stopping:
    """Whether a run is to stop, and how.

    Only a trainer that trains has something to keep: the step in progress, then a checkpoint. At any other moment, such as
    while engines start, in the warm-up, or in the last evaluation, all that can be kept is durable already, and the work
    ends at once.

    Args:
        policy: the trainer.
        rollout: ended with it.
    """

    def __init__(self, policy: Role, rollout: Role) -> None:
        self._policy, self._rollout = policy, rollout
        self._work: asyncio.Task[Any] | None = None
        self.trains = False
        """The trainer trains, and answers a `Stop` with a checkpoint."""
        self.requested = False
        self.at_once = False

    def watch(self, work: asyncio.Task[Any]) -> None:
        """This task is to be cut short; at once if a stop was requested before."""
        self._work = work
        if self.requested:
            work.cancel()

    def request(self, at_once: bool = False) -> str:
        """Stop the run.

        Args:
            at_once: wait for nothing; the run goes on from its last checkpoint.

        Returns:
            What is being done now.
        """
        self.requested, self.at_once = True, self.at_once or at_once
        if self.trains and not self.at_once:
            self._policy.send(Stop())
            return "stopping after the step in progress, with a checkpoint (Ctrl-C again: at once)"
        if self.at_once:
            self._policy.kill()
            self._rollout.kill()
        if self._work is not None:
            self._work.cancel()
        return "stopping at once" if self.at_once else "stopping"

    def saved(self) -> None:
        """The trainer's last checkpoint is there: what is still being waited for, such as a role that starts, is not needed."""
        self.trains = False
        if self.requested and self._work is not None:
            asyncio.get_running_loop().call_later(REST_SECONDS, self._work.cancel)

    @property
    def seconds(self) -> float:
        """Seconds in which a role may end by itself."""
        return 0.0 if self.at_once else ROLE_SECONDS if self.requested else STOP_SECONDS

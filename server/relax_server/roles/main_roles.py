"""The trainer and the rollout, as the controller sees them: started, watched, started again."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from relax_sdk.errors import RelaxError, RunError
from relax_sdk.runtime import Job
from relax_server.roles.fleet import EngineFleet
from relax_server.roles.messages import BatchTaken, Beat, Died, RolloutReport, Saved, StartPolicy, StartRollout, StepDone
from relax_server.roles.placement import Exchange, Placement
from relax_server.roles.rank_group import RankGroup
from relax_server.roles.record import Warns
from relax_server.roles.restarts import Restarts

SILENCE_SECONDS = 60.0
"""A rollout process, or a trainer that waits for its batch, that says nothing for so long is killed."""


class RoleDied(RelaxError):
    """A role that was being started again has ended; `message` says how."""

    def __init__(self, message: Died) -> None:
        super().__init__(f"the {message.role} process ended ({message.how})")
        self.message = message


class MainRoles:
    """The two roles that every run has.

    Args:
        job: the run.
        placement: starts them.
        restarts: counts how often.
        model_path: of the model that the run trains.
        exchange: where weights and media features are exchanged.
        hear_policy: gets what the trainer says.
        hear_rollout: gets what the rollout says.
        warn: says what happened to them.
    """

    def __init__(
        self,
        job: Job,
        placement: Placement,
        restarts: Restarts,
        model_path: Path,
        exchange: Exchange,
        hear_policy: Callable[[Any], None],
        hear_rollout: Callable[[Any], None],
        warn: Warns,
    ) -> None:
        self._job, self._placement, self._restarts, self._warn = job, placement, restarts, warn
        self._model_path, self._exchange = model_path, exchange
        threads, ranks = job.config.training.threads, job.config.layout.ranks
        self.policy = RankGroup(placement, "policy", job.folder, hear_policy, threads, ranks)
        self.rollout = placement.role("rollout", job.folder, hear_rollout)
        self._rollout_at: float | None = None
        """When the rollout was heard of last, once it is ready."""
        self._policy_at: float | None = None
        """When the trainer was heard of last, once it trains."""
        self._policy_waits = False
        self.step_seconds = job.config.training.step_timeout
        """For a training step once its batch is taken, and for a checkpoint. A trainer that takes longer is killed, and then
        started again or, where the run is to stop, ends it: a stop waits no longer either."""

    async def start_policy(self, checkpoint: Path | None) -> None:
        """Start the trainer; it is not looked at before it is heard of."""
        job, exchange = self._job, self._exchange
        self._policy_at = None
        await self.policy.start(
            StartPolicy(
                job.config,
                job.folder.name,
                job.folder,
                self._model_path,
                exchange.root,
                checkpoint,
                exchange.features,
                self._placement.journal,
                job.holder.id,
                one_machine=self._placement.one_machine,
            )
        )

    async def start_rollout(self, engines: EngineFleet) -> None:
        """Start the rollout; it begins when it is told to, and is not looked at before it is ready."""
        job = self._job
        self._rollout_at = None
        await self.rollout.start(
            StartRollout(
                job.spec,
                job.agent,
                job.config,
                job.folder.name,
                job.folder,
                self._model_path,
                engines.addresses,
                train=True,
                features=self._exchange.features,
                journal=self._placement.journal,
                claim=job.holder.id,
            )
        )

    def hear(self, message: Any) -> None:
        """Note who was heard of."""
        if isinstance(message, (Beat, BatchTaken, StepDone, Saved)):
            self.policy_is_well(waits=isinstance(message, Beat) and message.waiting)
        elif isinstance(message, RolloutReport):
            self.rollout_is_well()

    def rollout_is_well(self) -> None:
        """The rollout was heard of."""
        self._rollout_at = time.monotonic()

    def policy_is_well(self, waits: bool = False) -> None:
        """The trainer was heard of; `waits`: for its batch."""
        self._policy_at, self._policy_waits = time.monotonic(), waits

    def look_for_hangs(self, now: float) -> None:
        """Kill a role that was not heard of for too long; its end is then an event like any other."""
        if self._rollout_at is not None and now - self._rollout_at > SILENCE_SECONDS and self.rollout.alive():
            self._warn(f"the rollout process said nothing for {SILENCE_SECONDS:.0f} s and is killed", "alarm", "rollout")
            self._rollout_at = None
            self.rollout.kill()
        limit = SILENCE_SECONDS if self._policy_waits else self.step_seconds
        heard = self._policy_at
        if heard is not None and self._policy_waits:
            heard = min(heard, self.policy.quiet_since())
        if heard is not None and now - heard > limit and self.policy.alive():
            self._warn(f"the trainer said nothing for {limit:.0f} s and is killed", "alarm", "policy")
            self._policy_at = None
            self.policy.kill()

    async def restart(self, message: Died, start: Callable[[], Awaitable[None]]) -> None:
        """Start a role again that died; the journal makes sure that nothing is lost or trained twice.

        Args:
            message: of its end.
            start: starts it and brings it to where the run is; raises `RoleDied` when it ends meanwhile.

        Raises:
            RunError: it died too often, or cannot be started.
        """
        while True:
            self._restarts.count(
                message.role, f"the last time {message.how}; end of {message.log}:\n{await self._log(message)}"
            )
            self._warn(f"the {message.role} process ended ({message.how}); starting it again", "restart", message.role)
            try:
                return await start()
            except RoleDied as died:  # while it was starting
                message = died.message

    async def ended(self, message: Died) -> RunError:
        """The error of a run whose role died before it could begin."""
        log = await self._log(message)
        return RunError(f"the {message.role} process ended ({message.how}); end of {message.log}:\n{log}")

    async def _log(self, message: Died) -> str:
        return await (self.policy if message.role == "policy" else self.rollout).log_tail()

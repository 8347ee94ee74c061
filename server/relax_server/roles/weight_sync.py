"""The way of the weights: from the trainer's folders to all engines; in colocate mode the devices go the other way."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from relax_sdk.config import RunConfig
from relax_server.roles.fleet import EngineFleet
from relax_server.roles.messages import Continue, Loading
from relax_server.roles.placement import Role
from relax_server.timeline import Timeline


class WeightSync:
    """Holds which weights are the current ones, and who has the devices.

    Args:
        config: of the run.
        root: folder to which the trainer writes the weights, one sub-folder per version.
        engines: load them.
        policy: the trainer; waits for the devices in colocate mode.
        rollout: told before they are loaded.
        timeline: gets a span per load.
    """

    def __init__(
        self, config: RunConfig, root: Path, engines: EngineFleet, policy: Role, rollout: Role, timeline: Timeline
    ) -> None:
        self._config, self._root, self._engines, self._timeline = config, root, engines, timeline
        self._policy, self._rollout = policy, rollout
        self.weights: Path | None = None
        """The trainer's last ones; None before it is ready."""
        self._awaits_devices = False
        """Colocate: the trainer has its batch and waits for the engines' memory."""

    async def load(self, step: int) -> float:
        """Bring every engine to the current weights, and remove older ones.

        Args:
            step: that they are of.

        Returns:
            Seconds it took.
        """
        assert self.weights is not None
        began = time.perf_counter()
        version = self._config.version_at(step)
        self._rollout.send(Loading(version))
        with self._timeline.span("load weights", version=version):
            await self._engines.load(self.weights, version)
        for old in self._root.glob("v*"):
            if old != self.weights and int(old.name[1:]) < version:
                shutil.rmtree(old, ignore_errors=True)
        return time.perf_counter() - began

    def batch_taken(self) -> None:
        """The trainer has its batch; in colocate mode it waits for the devices."""
        self._awaits_devices = self._config.mode == "colocate"

    def trainer_lost(self) -> None:
        """The trainer is gone, and waits for nothing."""
        self._awaits_devices = False

    async def free_devices(self, generates: bool) -> None:
        """Colocate: once nothing is being generated, the engines give their memory back and the trainer goes on.

        Args:
            generates: an evaluation is under way.
        """
        if self._awaits_devices and not generates:
            self._awaits_devices = False
            await self._engines.release()
            self._policy.send(Continue())

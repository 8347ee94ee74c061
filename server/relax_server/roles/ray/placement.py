"""Where the actors of a run go: placement groups, and what the nodes share."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from relax_sdk.config import EngineKind, RunConfig
from relax_sdk.errors import RunError
from relax_server.engines.settings import EngineSettings
from relax_server.guard import TOKEN
from relax_server.models.catalog import cache_root
from relax_server.roles import shared_memory
from relax_server.roles.devices import shares
from relax_server.roles.field_worker import REFERENCE_ROLE, field_roles
from relax_server.roles.placement import Engine, Exchange, Role
from relax_server.roles.process import rank_name, thread_limits
from relax_server.roles.ray.role import RayEngine, RayRole

PLACE_SECONDS = 120.0
"""Seconds for a cluster to make room for a run."""


def needs(config: RunConfig) -> dict[str, int]:
    """CPUs of the actors of a run; each engine takes one."""
    fields = {role: config.training.threads if role == REFERENCE_ROLE else 1 for role in field_roles(config)}
    ranks = {rank_name("policy", rank): config.training.threads for rank in range(config.layout.ranks)}
    return {"controller": 1, "rollout": 1} | ranks | fields | {"engines": config.engines}


def listed(cpus: dict[str, int]) -> str:
    """`controller 1, rollout 1, …`"""
    return ", ".join(f"{role} {n}" for role, n in cpus.items())


def namespace(folder: Path) -> str:
    """The Ray namespace in which the actors of a run have their names."""
    return "relax-" + hashlib.sha256(str(folder).encode()).hexdigest()[:12]


def _bundle(cpus: int, gpus: float) -> dict[str, float]:
    return {"CPU": cpus} | ({"GPU": gpus} if gpus else {})


class RayPlacement:
    """Starts the roles of one run in the Ray cluster that this process is connected to; it travels to the controller.

    Args:
        folder: of the run.
        config: of the run.
        one_machine: all nodes see the same shared memory, so that weights go through it.

    Raises:
        ConfigError: the cluster has GPUs, but too few.
        RunError: the cluster has no room.
    """

    def __init__(self, folder: Path, config: RunConfig, one_machine: bool) -> None:
        self.folder, self.one_machine, self.journal = folder, one_machine, config.ray.journal
        self._cpus = needs(config)
        self._namespace = namespace(folder)
        self._env = {name: value for name, value in os.environ.items() if name.startswith("RELAX_") and name != TOKEN}
        self._shared: tuple[Path, ...] = ()
        self._roles = [role for role in self._cpus if role != "engines"]  # in the order of their bundles
        gpus = int(ray.cluster_resources().get("GPU", 0))
        self._shares = share = shares(config, gpus, REFERENCE_ROLE in self._roles)
        self._gpus = {rank_name("policy", rank): share.trainer for rank in range(config.layout.ranks)}
        self._gpus[REFERENCE_ROLE] = share.reference
        self._trunk = placement_group([_bundle(self._cpus[role], self._gpus.get(role, 0.0)) for role in self._roles])
        self._engines = placement_group([_bundle(1, share.engine) for _ in range(config.engines)])
        for group in (self._trunk, self._engines):
            if not group.wait(PLACE_SECONDS):
                self.close()
                total, free = sum(self._cpus.values()), ray.available_resources().get("CPU", 0)
                raise RunError(
                    f"no room in the Ray cluster within {PLACE_SECONDS:.0f} s: a run takes {total} CPUs "
                    f"({listed(self._cpus)}), and {free:g} are free; add nodes, or wait for other jobs to end"
                )

    def close(self) -> None:
        """Give the room back."""
        for group in (self._trunk, self._engines):
            remove_placement_group(group)

    # ------------------------------------------------------------------------------------------------------------ the Placement

    def role(self, name: str, folder: Path, on_message: Callable[[Any], None], threads: int = 1) -> Role:
        return RayRole(name, folder, on_message, self, threads)

    def engine(
        self,
        kind: EngineKind,
        model_path: Path,
        log_path: Path,
        settings: EngineSettings,
        *,
        progress: Callable[[str], None] | None = None,
        added: bool = False,
    ) -> Engine:
        return RayEngine(self, kind, model_path, log_path, settings, added, progress)

    def exchange(self, folder: Path) -> Exchange:
        """Shared memory where all nodes are on one machine, else the run folder."""
        if self.one_machine:
            exchange = Exchange.in_shared_memory()
            shared_memory.guard(exchange.root)
        else:
            exchange = Exchange(folder / "exchange", None)
            shutil.rmtree(exchange.root, ignore_errors=True)
            exchange.root.mkdir(exist_ok=True)
        self._shared = (*self._shared, exchange.root)
        return exchange

    def model(self, path: Path, folder: Path) -> Path:
        """A model that is built on the spot is copied into the run folder where nodes do not share this machine's files."""
        if not self.one_machine and path.is_relative_to(cache_root()):
            path = Path(shutil.copytree(path, folder / "model", dirs_exist_ok=True))
        self._shared = (*self._shared, path)
        return path

    # ---------------------------------------------------------------------------------------------------------- for actors

    @property
    def needed(self) -> tuple[Path, ...]:
        return (self.folder, *self._shared)

    def role_options(self, name: str, threads: int) -> dict[str, Any]:
        options = self._options(self._trunk, self._roles.index(name), self._cpus[name], threads, self._gpus.get(name, 0.0))
        return options | dict(name=name, namespace=self._namespace)

    def engine_options(self, added: bool) -> dict[str, Any]:
        options = self._options(self._engines, -1, 1, 1, self._shares.engine)
        return options | dict(scheduling_strategy="SPREAD") if added else options

    def _options(self, group: PlacementGroup, bundle: int, cpus: int, threads: int, gpus: float) -> dict[str, Any]:
        return dict(
            num_cpus=cpus,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            runtime_env={"env_vars": self._env | thread_limits(threads)},
        )

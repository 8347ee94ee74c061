"""What a registered environment may use, and what its guard is told of it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from relax_sdk.errors import ConfigError


@dataclass(frozen=True)
class WorkerLimits:
    """Limits for all processes of one worker together."""

    memory: int = 2 << 30
    """Bytes, those of files that it has written among them, which are kept in memory."""
    processes: int = 32
    cpus: float = 1.0
    """Processors it may keep busy on average; above, it is halted for a while."""
    stuck: int = 32
    """Calls that have passed their time limit and still run, after which the worker is started again."""
    files: int = 1 << 30
    """Bytes of all files that it may write, shared memory among them; for a trusted worker, of the largest."""
    open_files: int = 1024
    """Files and connections that each of its processes may have open."""
    network: bool = False
    """Whether it may use the network, this machine's included. A trusted worker is warned of where nobody can forbid that."""

    def __post_init__(self) -> None:
        for name, least in (("memory", 64 << 20), ("processes", 1), ("stuck", 1), ("files", 1 << 20), ("open_files", 64)):
            if getattr(self, name) < least:
                raise ConfigError(f"WorkerLimits.{name} = {getattr(self, name)}; allowed: {least} or more")
        if not self.cpus > 0:
            raise ConfigError(f"WorkerLimits.cpus = {self.cpus}; allowed: above 0")


@dataclass(frozen=True)
class WorkerPlan:
    """What a guard is told."""

    limits: WorkerLimits
    hidden: str
    """The service's folder, which the worker does not see."""
    trusted: bool
    """Run it without the sandbox."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerPlan:
        plan = json.loads(text)
        return cls(WorkerLimits(**plan.pop("limits")), **plan)

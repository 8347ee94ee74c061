"""What a registered environment may use."""

from __future__ import annotations

from dataclasses import dataclass

from relax_sdk.errors import ConfigError


@dataclass(frozen=True)
class WorkerLimits:
    """Limits for all processes of one worker together."""

    memory: int = 2 << 30
    """Bytes."""
    processes: int = 32
    cpus: float = 1.0
    """Processors it may keep busy on average; above, it is halted for a while."""
    stuck: int = 32
    """Calls that have passed their time limit and still run, after which the worker is started again."""
    files: int = 1 << 30
    """Bytes of the largest file it may write."""
    network: bool = False
    """Whether it may use the network. Where the system lets nobody forbid that, a warning says so."""

    def __post_init__(self) -> None:
        for name, least in (("memory", 64 << 20), ("processes", 1), ("stuck", 1), ("files", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"WorkerLimits.{name} = {getattr(self, name)}; allowed: {least} or more")
        if not self.cpus > 0:
            raise ConfigError(f"WorkerLimits.cpus = {self.cpus}; allowed: above 0")

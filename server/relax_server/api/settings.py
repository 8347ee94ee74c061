"""What a rollout service is told when it starts."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field
from pathlib import Path

from relax_sdk.config import RolloutConfig, SamplingParams
from relax_sdk.errors import ConfigError
from relax_server.api.environments.limits import WorkerLimits
from relax_server.api.logs import FORMATS, LEVELS, LogFormat, LogLevel


@dataclass(frozen=True)
class ServiceConfig:
    """Settings of `relax serve`."""

    folder: Path
    """Journal, media and logs."""
    model: str = "relax/tiny-omni"
    engines: tuple[str, ...] = ()
    """URLs of engines that serve `model`; empty: one embedded engine is started."""
    media_paths: bool = False
    """`engines` read the media folder themselves, so that they are sent paths in it; otherwise the bytes with every call."""
    host: str = "127.0.0.1"
    port: int = 8000
    no_keys: bool = False
    """Callers may go without a key though there are, or were, some; only at an address that this machine alone can reach."""
    journal: str | None = None
    """URL or file; None: `journal.db` in `folder`."""
    threads: int = 1
    """Threads of the embedded engine."""
    concurrency: int = 4096
    """Episodes at once, over all keys."""
    idle_timeout: float = 600.0
    """Seconds without a call after which a session is cancelled."""
    drain_seconds: float = 10.0
    """Seconds for what is under way when the service is told to end."""
    keep_events_days: float = 30.0
    """Events of what ended longer ago are pruned."""
    log_format: LogFormat = "text"
    log_level: LogLevel = "warning"
    """Lines about the service's own life are written at every level; a line for each request from `info` on."""
    max_body: int = 64 << 20
    """Bytes of a request."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How sessions and rollouts sample that say nothing else."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    max_runs: int = 1
    """Training runs at once; more wait."""
    max_engines: int = 4
    """Engines that one training run may have."""
    worker_limits: WorkerLimits = field(default_factory=WorkerLimits)
    """Limits of the worker of each environment that is registered."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder).absolute())
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"ServiceConfig.port = {self.port}; allowed: 0 (a free one) to 65535")
        for name, allowed in (("log_format", FORMATS), ("log_level", LEVELS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"ServiceConfig.{name} = {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        for name, least in (("concurrency", 1), ("max_body", 1024), ("threads", 1), ("max_runs", 1), ("max_engines", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"ServiceConfig.{name} = {getattr(self, name)}; allowed: {least} or more")
        if self.no_keys and not self.loopback:
            raise ConfigError(
                f"ServiceConfig.no_keys = True with host = {self.host}; allowed: an address of this machine alone"
            )
        if self.idle_timeout <= 0:
            raise ConfigError(f"ServiceConfig.idle_timeout = {self.idle_timeout}; allowed: above 0 seconds")
        if not 0 < self.keep_events_days < math.inf:
            raise ConfigError(f"ServiceConfig.keep_events_days = {self.keep_events_days}; allowed: above 0 days")
        if not 0 <= self.drain_seconds < math.inf:
            raise ConfigError(f"ServiceConfig.drain_seconds = {self.drain_seconds}; allowed: 0 seconds or more")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

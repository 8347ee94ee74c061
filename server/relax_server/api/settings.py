"""What a rollout service is told when it starts."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from relax_sdk.config import RolloutConfig, SamplingParams
from relax_sdk.errors import ConfigError


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
    journal: str | None = None
    """URL or file; None: `journal.db` in `folder`."""
    threads: int = 1
    """Of the embedded engine."""
    concurrency: int = 4096
    """Episodes at once, over all keys."""
    idle_timeout: float = 600.0
    """Seconds without a call after which a session is cancelled."""
    max_body: int = 64 << 20
    """Bytes of a request."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Of sessions and rollouts that say nothing else."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder).absolute())
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"ServiceConfig.port = {self.port}; allowed: 0 (a free one) to 65535")
        for name, least in (("concurrency", 1), ("max_body", 1024), ("threads", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"ServiceConfig.{name} = {getattr(self, name)}; allowed: {least} or more")
        if self.idle_timeout <= 0:
            raise ConfigError(f"ServiceConfig.idle_timeout = {self.idle_timeout}; allowed: above 0 seconds")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

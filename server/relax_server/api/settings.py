"""What a rollout service is told when it starts."""

from __future__ import annotations

import ipaddress
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from relax_sdk.config import RolloutConfig, SamplingParams
from relax_sdk.errors import ConfigError
from relax_server.api.door.limits import DoorLimits
from relax_server.api.environments.limits import WorkerLimits
from relax_server.api.logs import FORMATS, LEVELS, LogFormat, LogLevel
from relax_server.api.media.limits import DecoderLimits
from relax_server.guard import is_loopback

ROOT_PATH = r"(?!/v1(/|$))(/[A-Za-z0-9._~-]+){1,16}"
MOST_WORKERS = 64
"""Processes of one service."""


@dataclass(frozen=True)
class ServiceConfig:
    """Settings of `relax serve`."""

    folder: Path
    """Journal, media and logs."""
    model: str = "relax/tiny-omni"
    engines: tuple[str, ...] = ()
    """URLs of engines that serve `model`; empty: one embedded engine is started."""
    engine_token: str = field(default="", repr=False)
    """Shown to `engines`; empty: what `engines.tokens.find_token` finds for each."""
    media_paths: bool = False
    """`engines` read the media folder themselves, so that they are sent paths in it; otherwise the bytes with every call."""
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    """Processes that answer requests; they share the port, the folder, the journal and the engines."""
    no_keys: bool = False
    """Callers may go without a key though there are, or were, some; only at an address that this machine alone can reach."""
    name: str = ""
    """Ends the ids and keys of its sessions, so that a proxy in front of several services finds theirs; empty: there is one."""
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
    traces: str = ""
    """URL of a receiver of OpenTelemetry traces over HTTP, which gets spans of all episodes; empty: none."""
    log_format: LogFormat = "text"
    log_level: LogLevel = "warning"
    """Lines about the service's own life are written at every level; a line for each request from `info` on."""
    max_log: int = 64 << 20
    """Bytes of a log file in the folder; the end of it, as large, is kept beside the new one."""
    max_body: int = 64 << 20
    """Bytes of a request that carries media or code."""
    proxies: tuple[str, ...] = ()
    """Addresses of proxies; what they say of the client's address and of https is believed."""
    allowed_hosts: tuple[str, ...] = ()
    """Names under which clients may reach it, besides its address; empty: any, but at a loopback address without proxies."""
    root_path: str = ""
    """Path at which a proxy serves it, such as `/relax`; the proxy takes it away before it asks."""
    door: DoorLimits = field(default_factory=DoorLimits)
    """Limits of connections and of all other requests."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How sessions and rollouts sample that say nothing else."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    max_runs: int = 1
    """Training runs at once; more wait."""
    max_rollouts: int = 64
    """Rollouts of one key that are not over."""
    max_engines: int = 4
    """Engines that one training run may have."""
    worker_limits: WorkerLimits = field(default_factory=WorkerLimits)
    """Limits of the worker of each environment that is registered."""
    trust_uploads: bool = False
    """Run code from outside without the sandbox: whoever may upload may then do all that the service may."""
    decoder_limits: DecoderLimits = field(default_factory=DecoderLimits)
    """Limits of the processes that media are decoded in."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder).absolute())
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"ServiceConfig.port = {self.port}; allowed: 0 (a free one) to 65535")
        if self.traces and not self.traces.startswith(("http://", "https://")):
            raise ConfigError(f"ServiceConfig.traces = {self.traces!r}; allowed: http://host:port, or empty")
        for name, allowed in (("log_format", FORMATS), ("log_level", LEVELS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"ServiceConfig.{name} = {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        for name, least in (
            ("concurrency", 1),
            ("max_body", 1024),
            ("max_log", 1024),
            ("threads", 1),
            ("max_runs", 1),
            ("max_rollouts", 1),
            ("max_engines", 1),
            ("workers", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"ServiceConfig.{name} = {getattr(self, name)}; allowed: {least} or more")
        if self.workers > MOST_WORKERS:
            raise ConfigError(f"ServiceConfig.workers = {self.workers}; allowed: 1 to {MOST_WORKERS}")
        if self.workers > 1 and sys.platform != "linux":
            raise ConfigError(f"ServiceConfig.workers = {self.workers}; allowed on {sys.platform}: 1, as others need Linux")
        if not re.fullmatch("[a-z0-9]{0,16}", self.name):
            raise ConfigError(f"ServiceConfig.name = {self.name!r}; allowed: at most 16 small letters a to z and digits")
        if self.no_keys and self.exposed:
            raise ConfigError(
                f"ServiceConfig.no_keys = True with host = {self.host} and proxies = {self.proxies}; "
                "allowed: an address of this machine alone, without a proxy"
            )
        for proxy in self.proxies:
            _address(proxy)
        if self.root_path and not re.fullmatch(ROOT_PATH, self.root_path):
            allowed = "a path as /relax or /tools/relax, without a slash at its end and not /v1"
            raise ConfigError(f"ServiceConfig.root_path = {self.root_path!r}; allowed: {allowed}")
        if self.idle_timeout <= 0:
            raise ConfigError(f"ServiceConfig.idle_timeout = {self.idle_timeout}; allowed: above 0 seconds")
        if not 0 < self.keep_events_days < math.inf:
            raise ConfigError(f"ServiceConfig.keep_events_days = {self.keep_events_days}; allowed: above 0 days")
        if not 0 <= self.drain_seconds < math.inf:
            raise ConfigError(f"ServiceConfig.drain_seconds = {self.drain_seconds}; allowed: 0 seconds or more")

    def signed(self, random: str) -> str:
        """The random part of a session's id or key, such that a proxy sees which service has the session."""
        return f"{random}~{self.name}" if self.name else random

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)

    @property
    def exposed(self) -> bool:
        """Whether other machines can reach it, at its address or through a proxy."""
        return bool(self.proxies) or not self.loopback

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names that the `Host` header of a request may have; empty: any."""
        own = (self.host, "127.0.0.1", "localhost", "::1", "[::1]")
        return (*own, *self.allowed_hosts) if self.allowed_hosts or not self.exposed else ()


def _address(proxy: str) -> None:
    """Check the address of a proxy.

    Raises:
        ConfigError: it is none.
    """
    try:
        ipaddress.ip_network(proxy)
    except ValueError as error:
        raise ConfigError(
            f"ServiceConfig.proxies: {proxy!r} is no IP address or network, as 10.0.0.7 or 10.0.0.0/24"
        ) from error

"""Limits on connections and requests that hold before anything of a request is looked at."""

from __future__ import annotations

import math
import resource
from dataclasses import dataclass

from relax_sdk.errors import ConfigError

KEPT_FILES = 512
"""Open files that connections leave for the rest: journal, media, engines, workers and logs."""
WANTED_FILES = 65_536
"""Open files that the service asks the system for when it starts."""


@dataclass(frozen=True)
class DoorLimits:
    """Limits of what comes over the network."""

    connections: int = 16_384
    """Open connections, over all addresses; fewer where the system allows fewer open files."""
    connections_per_address: int = 8192
    """Open connections of one address, and at most three quarters of all; addresses of proxies are not counted."""
    header_seconds: float = 10.0
    """Seconds from the first byte of a request, or from the connection, to the end of the headers."""
    body_seconds: float = 120.0
    """Seconds from the first byte of a request to the last one of its body."""
    json_bytes: int = 4 << 20
    """Bytes of a request that carries no media and no code."""
    read_seconds: float = 30.0
    """Seconds in which a client must have taken something of an answer that waits for it."""
    unread_bytes: int = 256 << 20
    """Bytes of answers that may wait for all clients."""
    refusals_per_second: float = 50.0
    """Refused requests of one key, or of one address without a key; who has more is slowed down."""

    def __post_init__(self) -> None:
        for name, least in (("connections", 1), ("connections_per_address", 1), ("json_bytes", 1024), ("unread_bytes", 1024)):
            if getattr(self, name) < least:
                raise ConfigError(f"DoorLimits.{name} = {getattr(self, name)}; allowed: {least} or more")
        for name in ("header_seconds", "body_seconds", "read_seconds", "refusals_per_second"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"DoorLimits.{name} = {getattr(self, name)}; allowed: above 0, and finite")


def connections_allowed(wanted: int) -> int:
    """How many connections may be open: as many as are wanted, or as the limit of open files leaves.

    The limit of this process is raised as far as the system lets it, up to `WANTED_FILES`.

    Args:
        wanted: connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - KEPT_FILES))

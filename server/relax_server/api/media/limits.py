"""What a process that decodes media may use."""

from __future__ import annotations

import os
from dataclasses import dataclass

from relax_sdk.errors import ConfigError

PROCESSES = max(3, min(4, os.cpu_count() or 1))
"""As many as there are processors, but three or four."""


@dataclass(frozen=True)
class DecoderLimits:
    """Limits of the processes that media of strangers are decoded in."""

    processes: int = PROCESSES
    """Processes at once, started when they are needed; one key may have all but one of them."""
    seconds: float = 60.0
    """Seconds for one item, after which its process is killed."""
    cpu_seconds: int = 20
    """Seconds of a processor for one item."""
    memory: int = 1 << 30
    """Bytes that a process may take beyond what it has when it is ready."""
    waiting: int = 512 << 20
    """Bytes of one key's items that may wait for a process."""

    def __post_init__(self) -> None:
        for name, least in (("processes", 2), ("cpu_seconds", 1), ("memory", 64 << 20), ("waiting", 1 << 20)):
            if getattr(self, name) < least:
                raise ConfigError(f"DecoderLimits.{name} = {getattr(self, name)}; allowed: {least} or more")
        if not self.seconds > 0:
            raise ConfigError(f"DecoderLimits.seconds = {self.seconds}; allowed: above 0")

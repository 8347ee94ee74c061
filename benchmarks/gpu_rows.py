"""What the parts of `benchmarks.gpu_check` have in common: a line of its table, and waiting for the device."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    part: str
    case: str
    figure: str
    value: float | str | None
    bar: float | None = None
    """At most so much; None: no bar."""

    def plain(self) -> dict[str, Any]:
        ok = None if self.bar is None else isinstance(self.value, float) and self.value <= self.bar
        return vars(self) | {"ok": {None: None, True: "yes", False: "NO"}[ok]}


def device_name() -> str:
    """The GPU's name, else the CPU's."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()


def wait_for_device() -> None:
    """Wait until all that was begun on the GPU is done."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any], times: int = 5) -> float:
    """Median seconds of a call, until its work is done."""
    taken = []
    for _ in range(times):
        wait_for_device()
        began = time.perf_counter()
        call()
        wait_for_device()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)

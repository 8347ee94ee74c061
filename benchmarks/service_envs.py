"""Registers the environments of the benchmarks, in every worker of the service that they measure."""

from __future__ import annotations

from typing import Any

from benchmarks.envs import ENDLESS, Echo, EchoAsync, EchoInThreads, Shows, Waits
from relax_sdk.registry import register

ENVS: dict[str, tuple[type, dict[str, Any]]] = {
    "bench-1": (Echo, {"turns": 1}),
    "bench-5": (Echo, {"turns": 5}),
    "bench-steps-async": (EchoAsync, {"turns": ENDLESS}),
    "bench-steps-threads": (EchoInThreads, {"turns": ENDLESS}),
    "bench-waits": (Waits, {"turns": 1, "seconds": 1.0}),
    "bench-shows-3": (Shows, {"turns": 3, "own": False}),
    "bench-shows-own-3": (Shows, {"turns": 3, "own": True}),
}
ROWS = 8192
"""Tasks of each."""

for _id, (_env, _kwargs) in ENVS.items():
    register(_id, _env, tasks={"train": [{"index": i} for i in range(ROWS)]}, kwargs=_kwargs)

"""How a run stands at this moment: its roles, its queue and its episodes, in one small file that is replaced as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from relax_server.roles.placement import Role
from relax_server.roles.restarts import Restarts
from relax_server.roles.slot import EngineSlot

RunState = Literal["starting", "warmup", "training", "evaluating", "ended", "stopped", "failed"]
WRITE_SECONDS = 1.0
"""Least seconds between two versions of the file."""
ALIVE_SECONDS = 15.0
"""Seconds after which it is written again though nothing has changed: its time says that the run lives."""


@dataclass(frozen=True)
class RoleStatus:
    """One role of a run."""

    name: str
    """As in the name of its log, without the ending."""
    kind: str
    """`rollout`, `policy`, `advantages`, `reference`, or the kind of an engine: `embedded`, `sglang`, `vllm`."""
    pid: int | None
    """On its host; None: it does not run here, or not yet."""
    host: str
    state: str
    """`starting`, `running`, `ended`; of engines also `current`, `draining`, `lost`."""
    restarts: int
    since: float | None
    """Unix seconds of its last start."""
    log: str | None
    """Name of its file in the folder of logs."""


@dataclass(frozen=True)
class RunStatus:
    """What is in the file beside the time."""

    state: RunState
    stage: str
    """What is being done when it is not a step; empty while steps are made."""
    step: int
    """Optimizer steps that are done."""
    steps: int
    """How many the whole run has."""
    roles: tuple[RoleStatus, ...]
    queue: float | None
    """Groups that were ready when the last step's batch was taken."""
    rollout: dict[str, Any]
    """The rollout's last figures, as in `relax_server.rollout.RolloutStats`; empty before the first."""
    reason: str = ""
    """Why the run failed or was stopped; empty: it did not, or not yet."""


def role_statuses(roles: Mapping[str, Role], engines: Iterable[EngineSlot], restarts: Restarts) -> tuple[RoleStatus, ...]:
    """All roles of a run, and its engines."""
    processes = [_role(role, name, restarts) for name, role in roles.items()]
    return (*processes, *(_engine(slot, restarts) for slot in engines))


def _role(role: Role, name: str, restarts: Restarts) -> RoleStatus:
    """A role that is a process of ours."""
    state = "running" if role.alive() else "ended" if role.generation else "starting"
    return RoleStatus(name, name, role.pid, role.host, state, restarts.total(name), role.since, f"{name}.log")


def _engine(slot: EngineSlot, restarts: Restarts) -> RoleStatus:
    """An engine, ours or one that runs elsewhere."""
    process, name = slot.process, f"engine-{slot.id}"
    host = urlsplit(slot.url).hostname or "" if process is None else process.host
    log = None if process is None else f"{name}.log"
    pid = None if process is None else process.pid
    state = "ended" if slot.state == "current" and process is not None and not process.alive() else slot.state
    return RoleStatus(name, slot.kind, pid, host, state, restarts.total(f"engine {slot.id}"), slot.since, log)


class StatusFile:
    """Keeps the file up to date.

    A version that cannot be written, as on a full disk, is left out: the metrics end such a run.

    Args:
        path: of the file.
        look: how the run stands.
    """

    def __init__(self, path: Path, look: Callable[[], RunStatus]) -> None:
        self._path, self._look = path, look
        self._written: RunStatus | None = None
        self._at = 0.0

    async def keep(self) -> None:
        """Write whenever something has changed, at most once a second, until cancelled."""
        while True:
            status = self._look()
            if status != self._written or time.monotonic() - self._at > ALIVE_SECONDS:
                await asyncio.to_thread(self.write, status)
            await asyncio.sleep(WRITE_SECONDS)

    def write(self, status: RunStatus) -> None:
        """Replace the file."""
        self._written, self._at = status, time.monotonic()
        temporary = self._path.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps({"time": time.time()} | asdict(status), default=float))
            temporary.replace(self._path)

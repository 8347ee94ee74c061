"""Where the roles of a run are started: the interface, and this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from relax_sdk.config import EngineKind
from relax_sdk.runtime import silent
from relax_server.engines.kinds import process_of
from relax_server.engines.settings import EngineSettings
from relax_server.roles import shared_memory
from relax_server.roles.devices import NONE, Devices
from relax_server.roles.process import RoleProcess


class Role(Protocol):
    """A role in a process of its own; its messages, and `Died`, go to whoever started it."""

    @property
    def generation(self) -> int:
        """How often it was started; `Died` says which of them ended."""
        ...

    @property
    def host(self) -> str:
        """Name of the machine that it is on; empty where that is not known yet."""
        ...

    @property
    def since(self) -> float | None:
        """Unix seconds of its last start; None before that."""
        ...

    @property
    def pid(self) -> int | None:
        """None before it runs."""
        ...

    async def start(self, first: Any) -> None:
        """Start it, or start it again, with its first message."""
        ...

    def send(self, message: Any) -> None:
        """Send; one that is gone is reported by `Died`, not here."""
        ...

    def alive(self) -> bool: ...

    async def stop(self, seconds: float = ...) -> None:
        """Ask it to stop, and kill it when it has not ended after so many seconds."""
        ...

    def kill(self) -> None:
        """SIGKILL, for a role that hangs."""
        ...

    async def log_tail(self) -> str:
        """The end of its log."""
        ...


class Engine(Protocol):
    """One engine in a process of its own."""

    host: str
    """Name of the machine that it is on; empty where that is not known yet."""

    @property
    def pid(self) -> int | None:
        """On its host; None before it runs."""
        ...

    @property
    def url(self) -> str: ...

    @property
    def token(self) -> str: ...

    async def start(self, timeout: float) -> None:
        """Start it and wait until it answers.

        Raises:
            EngineUnavailable: it ended or was not ready in time.
        """
        ...

    def alive(self) -> bool: ...

    async def stop(self) -> None: ...

    async def log_tail(self) -> str: ...


@dataclass(frozen=True)
class Exchange:
    """Where the roles of a run leave what is too large for messages."""

    root: Path
    """Gets the weights, one sub-folder per version."""
    features: Path | None
    """For media features; None: each process makes its own."""

    @classmethod
    def in_shared_memory(cls) -> Exchange:
        """A new one in this machine's shared memory; what runs have left there whose processes were killed is removed.

        Raises:
            OSError: no room.
        """
        shared_memory.sweep()
        root = shared_memory.create()
        (root / "features").mkdir()
        return cls(root, root / "features")

    def renew(self) -> bool:
        """Make it again where it has vanished, such as by a clean-up of shared memory; whether it had.

        Raises:
            OSError: it cannot be made.
        """
        gone = not self.root.exists()
        for folder in filter(None, (self.root, self.features)):
            folder.mkdir(mode=0o700, exist_ok=True)
        return gone


class Placement(Protocol):
    """Starts the roles of one run."""

    def role(self, name: str, folder: Path, on_message: Callable[[Any], None], threads: int = 1) -> Role:
        """A role, not started yet.

        Args:
            name: `rollout`, `policy`, `policy-1` and so on for its other ranks, `advantages` or `reference`.
            folder: of the run.
            on_message: gets its messages, in the event loop that starts it.
            threads: of numeric libraries.
        """
        ...

    def engine(
        self,
        kind: EngineKind,
        model_path: Path,
        log_path: Path,
        settings: EngineSettings,
        *,
        progress: Callable[[str], None] | None = None,
        added: bool = False,
    ) -> Engine:
        """An engine, not started yet.

        Args:
            kind: what is to run.
            model_path: of the model to serve.
            log_path: where its output goes.
            settings: how it is started.
            progress: told what it is doing while it starts; None: it starts fast and says nothing.
            added: beyond those that the run began with, for which room is kept.
        """
        ...

    def exchange(self, folder: Path) -> Exchange:
        """Make the place where weights are exchanged; to be removed with `shared_memory.remove`."""
        ...

    def model(self, path: Path, folder: Path) -> Path:
        """A model folder where all roles see it."""
        ...

    @property
    def journal(self) -> str | None:
        """The database that keeps the groups; None: a file in the run folder."""
        ...

    @property
    def one_machine(self) -> bool:
        """All roles are on one machine, and see its shared memory."""
        ...


class LocalPlacement:
    """Processes on this machine.

    Args:
        devices: the GPUs that each of them sees.
    """

    journal: str | None = None
    one_machine = True

    def __init__(self, devices: Devices = NONE) -> None:
        self._devices = devices
        self._numbers: dict[Path, int] = {}
        """The number of each engine, by its log: one that is started again has the GPUs that it had."""

    def role(self, name: str, folder: Path, on_message: Callable[[Any], None], threads: int = 1) -> Role:
        return RoleProcess(name, folder, on_message, threads, self._devices.of_role(name))

    def engine(
        self,
        kind: EngineKind,
        model_path: Path,
        log_path: Path,
        settings: EngineSettings,
        *,
        progress: Callable[[str], None] | None = None,
        added: bool = False,
    ) -> Engine:
        number = self._numbers.setdefault(log_path, len(self._numbers))
        settings = dataclasses.replace(settings, env={**self._devices.of_engine(number), **settings.env})
        return process_of(kind, model_path, log_path, settings, progress or silent)

    def exchange(self, folder: Path) -> Exchange:
        return Exchange.in_shared_memory()

    def model(self, path: Path, folder: Path) -> Path:
        return path

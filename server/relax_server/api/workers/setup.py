"""What a worker is told when it is started, by the process that starts it."""

from __future__ import annotations

from dataclasses import dataclass

from relax_server.api.engine_roster import EngineAccess
from relax_server.api.settings import ServiceConfig


@dataclass(frozen=True)
class WorkerSetup:
    """Sent over a pipe, as nobody else may read the engines' tokens. The numbers of open files are the worker's own."""

    config: ServiceConfig
    modules: tuple[str, ...]
    """Imported before anything else."""
    index: int
    parent: int
    """Id of the process that starts it, with which it ends."""
    engines: tuple[EngineAccess, ...]
    listener: int
    board: int
    inbox: int
    outboxes: dict[int, int]
    """The ends to write to, by the number of the process that reads."""

    @property
    def files(self) -> list[int]:
        """All open files that it inherits."""
        return [self.listener, self.board, self.inbox, *self.outboxes.values()]

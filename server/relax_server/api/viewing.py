"""The viewer over what a service holds: training runs, rollouts and sessions, each for the key that they were made for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import select
from starlette.requests import HTTPConnection

from relax_server.api.auth import caller
from relax_server.api.core import ServiceCore
from relax_server.api.keys import LOCAL, Key
from relax_server.api.trainings.hub import TrainingHub
from relax_server.journal.schema import runs
from relax_server.viewer.base import Source, ViewedRun
from relax_server.viewer.folders import run_in
from relax_server.viewer.journals import Journals

TRAININGS = 1000
"""Training runs that are listed, the newest."""


class ServiceDoor:
    """Lets callers of a service in, each to what its key owns.

    Args:
        core: of the service.
        trainings: its training runs.
    """

    def __init__(self, core: ServiceCore, trainings: TrainingHub) -> None:
        self._core, self._trainings = core, trainings
        self._journals = Journals()

    async def enter(self, request: HTTPConnection) -> Source:
        """See `Door.enter`."""
        return ServiceSource(self._core, self._trainings, self._journals, await caller(request, self._core))

    async def wants_key(self) -> bool:
        """See `Door.wants_key`."""
        return await self._core.wants_keys()

    def close(self) -> None:
        """Close what was opened for it."""
        self._journals.close()


class ServiceSource:
    """What one key may look at; those that administer see everything.

    Args:
        core: of the service.
        trainings: its training runs.
        journals: where the journals of training runs are opened.
        key: of the caller.
    """

    def __init__(self, core: ServiceCore, trainings: TrainingHub, journals: Journals, key: Key) -> None:
        self._core, self._trainings, self._journals, self._key = core, trainings, journals, key
        self._shows_paths = key is LOCAL or key.may("admin")

    def runs(self) -> Sequence[ViewedRun]:
        """See `Source.runs`."""
        owner = None if self._key.may("admin") else self._key.id
        trained = [self._trained(training.id) for training in self._trainings.store.list(owner, TRAININGS)]
        recorded = [self._recorded(name) for name in self._names()]
        return [run for run in (*trained, *recorded) if run is not None]

    def run(self, name: str) -> ViewedRun | None:
        """See `Source.run`."""
        training = self._trainings.store.get(name)
        if training is not None and (training.key == self._key.id or self._key.may("admin")):
            return self._trained(training.id)
        return self._recorded(name) if name in self._names(name) else None

    def _trained(self, id: str) -> ViewedRun | None:
        """A training run, if its folder is within reach of this server."""
        folder: Path = self._trainings.folder / id
        return run_in(folder, self._journals, self._shows_paths) if folder.is_dir() else None

    def _recorded(self, name: str) -> ViewedRun:
        """Episodes of rollouts and sessions, in the service's own journal."""
        core = self._core
        models = (core.processor.path,)
        return ViewedRun(name, None, name, lambda: core.journal, core.store.root, models, self._shows_paths)

    def _names(self, name: str | None = None) -> list[str]:
        """The runs of the journal that the key may see; only `name`, if it is given."""
        query = select(runs.c.id).order_by(runs.c.created_at, runs.c.id)
        if not self._key.may("admin"):
            mine = runs.c.owner == self._key.id
            query = query.where(mine | runs.c.owner.is_(None) if self._key is LOCAL else mine)
        if name is not None:
            query = query.where(runs.c.id == name)
        with self._core.journal.reading("list the runs of a key") as connection:
            return list(connection.scalars(query))

"""What training runs have made: files in their folders, and a model that can be asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from relax_sdk.run import METRICS, WEIGHTS
from relax_server.api.core import ServiceCore
from relax_server.api.keys import Key
from relax_server.api.trainings.model import TrainedModel
from relax_server.api.trainings.protocol import Request, Start
from relax_server.api.trainings.store import Training
from relax_server.gateway.errors import ApiError, bad


class StartOf(Protocol):
    """Makes what a run's process is told first."""

    def __call__(self, training: Training, do: Any) -> Awaitable[Start]: ...


class MadeByRuns:
    """Files and models of the runs whose folders are within reach.

    Args:
        core: of the service.
        folder: that the runs' folders are in.
        start: what the process that serves a model is told.
        log: where that process writes its log.
    """

    def __init__(self, core: ServiceCore, folder: Path, start: StartOf, log: Callable[[Training], Path]) -> None:
        self.core, self.folder, self._start, self._log = core, folder, start, log
        self._models: dict[str, TrainedModel] = {}

    def here(self, training: Training) -> bool:
        """Whether what a run has made is within reach."""
        return training.server == self.core.identity.id or (self.folder / training.id).exists()

    def require_here(self, training: Training) -> None:
        """Refuse what needs something that another server has.

        Raises:
            ApiError: 409.
        """
        if not self.here(training):
            message = f"what run {training.id} has made is in the folder of another server, {training.server}; ask that one"
            raise ApiError(409, message, "elsewhere")

    def files(self, training: Training) -> dict[str, Path]:
        """What a run has made, by the name that it can be fetched by.

        Raises:
            ApiError: 409; another server has it.
        """
        self.require_here(training)
        folder = self.folder / training.id
        names = [METRICS, "reward.png", "timeline.json"]
        names += [f"{WEIGHTS}/{path.name}" for path in sorted((folder / WEIGHTS).glob("*")) if path.is_file()]
        return {name: folder / name for name in names if (folder / name).is_file()}

    async def ask(self, training: Training, request: Request, key: Key) -> Any:
        """Evaluate, or generate with, what a run has trained, while the key that asks works.

        Raises:
            ApiError: it has no weights yet, or another server has them, or the request cannot be carried out.
        """
        self.require_here(training)
        if not (self.folder / training.id / WEIGHTS).exists():
            raise ApiError(409, f"run {training.id} has no trained weights yet", "not_ready")
        model = self._models.get(training.id)
        if model is None or model.ended:
            start = await self._start(training, do="serve")
            model = self._models[training.id] = TrainedModel(start, self._log(training))
        over = self.core.watch.use(key.id, lambda why: self.core.spawn(model.close()))
        try:
            told = await model.ask(request)
        finally:
            over()
        if told.kind == "failed":
            raise bad(told.text, code="run_error")
        return told.data

    async def close(self) -> None:
        """End the processes that serve models."""
        await asyncio.gather(*(model.close() for model in self._models.values()))

"""Worker processes that are the ranks of one layout after another."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

from training_worker import Worker

from relax_sdk.layout import LayoutConfig


def begin(rank: int, layout: LayoutConfig, meeting: Path) -> None:
    """Take part in a layout, in the place of the one before; the ranks meet as those of a run do."""
    from relax_server.training.megatron import parallel
    from relax_server.training.ranks import rendezvous

    leave()
    parallel.initialize(seed=0, layout=layout, rank=rank, store=rendezvous(meeting, layout.ranks))


def leave() -> None:
    """Take part in no layout any more. Each group of ranks has threads that look for news a hundred times a second."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
    from relax_server.training.megatron import parallel

    # Both hold their model where nothing frees it: by the graph of the last tokens, and by hooks of the backward pass.
    for item in gc.get_objects():
        if issubclass(type(item), (MoETokenDispatcher, DistributedDataParallel)):
            vars(item).clear()
    parallel.shutdown()


class Ranks:
    """Processes that do something together."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    def run(self, layout: LayoutConfig, function: Any, *args: Any) -> list[Any]:
        """What each rank returned; the function takes rank, layout and meeting first, and calls `begin` with them."""
        while len(self._workers) < layout.ranks:
            self._workers.append(Worker())
        workers = self._workers[: layout.ranks]
        answers: list[Any] = []
        errors: list[BaseException] = []
        with tempfile.TemporaryDirectory() as folder:
            for rank, worker in enumerate(workers):
                worker.send(function, rank, layout, Path(folder) / "meeting", *args)
            for worker in workers:  # all of them: an answer that is left would be that to the next question
                try:
                    answers.append(worker.receive())
                except Exception as error:
                    errors.append(error)
        if errors:
            raise errors[0]
        return answers

    def leave(self) -> None:
        """Let the processes take part in no layout."""
        for worker in self._workers:
            worker.run(leave)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

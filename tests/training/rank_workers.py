"""Worker processes that are the ranks of one layout after another."""

from __future__ import annotations

import gc
import socket
from typing import Any

from training_worker import Worker

from relax_sdk.layout import LayoutConfig


def begin(rank: int, layout: LayoutConfig, port: int) -> None:
    """Take part in a layout, in the place of the one before."""
    from relax_server.training.megatron import parallel

    leave()
    parallel.initialize(seed=0, layout=layout, rank=rank, port=port)


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
        """What each rank returned; the function takes rank, layout and port first, and calls `begin` with them."""
        while len(self._workers) < layout.ranks:
            self._workers.append(Worker())
        workers = self._workers[: layout.ranks]
        port = free_port()
        for rank, worker in enumerate(workers):
            worker.send(function, rank, layout, port, *args)
        answers: list[Any] = []
        errors: list[BaseException] = []
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

"""One worker process for all tests that touch Megatron, and some more for those of several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from layout_steps import with_layers
from rank_workers import Ranks, leave
from relax_server.models.families import TABLE
from training_worker import Worker

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def one_worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def worker(one_worker: Worker) -> Iterator[Worker]:
    """The process of the session, which is in no group of ranks while no test needs it."""
    yield one_worker
    one_worker.run(leave)


@pytest.fixture(scope="session")
def all_ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def ranks(all_ranks: Ranks) -> Iterator[Ranks]:
    """Processes for layouts of several ranks; the files that use them are named in `RANKS` of the conftest above."""
    yield all_ranks
    all_ranks.leave()


@pytest.fixture(scope="session")
def deeper(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], str]:
    """The folder of a model of a family with so many decoder layers, made once."""
    known: dict[tuple[str, int], str] = {}

    def of(family: str, layers: int) -> str:
        if (family, layers) not in known:
            known[family, layers] = str(with_layers(TABLE[family], layers, tmp_path_factory.mktemp("deeper") / "model"))
        return known[family, layers]

    return of

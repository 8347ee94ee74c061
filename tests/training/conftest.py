"""One worker process for all tests that touch Megatron, and some more for those of several ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from rank_workers import Ranks
from training_worker import Worker

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes for layouts of several ranks; the files that use them are named in `RANKS` of the conftest above."""
    ranks = Ranks()
    yield ranks
    ranks.close()

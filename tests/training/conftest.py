"""One worker process for all tests that touch Megatron."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from training_worker import Worker

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()

"""`/readyz` says no when the engine or the database does not answer, and says so soon."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from postgres_server import PostgresServer
from service_process import Service, start


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[str, psutil.Process]]:
    """URL and process of a fake engine."""
    log = tmp_path / "engine.log"
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.fake_engine"], stdout=file, stderr=file)
    until(lambda: "engine at " in log.read_text())
    yield log.read_text().split("engine at ")[1].split()[0], psutil.Process(process.pid)
    process.kill()
    process.wait()


@pytest.fixture
def served(tmp_path: Path, engine: tuple[str, psutil.Process], postgres: PostgresServer) -> Iterator[Service]:
    """A service with that engine and PostgreSQL."""
    it = start(tmp_path / "service", "--engine", engine[0], "--journal", postgres.make(), "--drain-seconds", "0")
    yield it
    it.stop()


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.05)


def ready(it: Service) -> tuple[int, str]:
    answer = httpx.get(it.url + "/readyz", timeout=30)
    return answer.status_code, answer.json()["reason"]


def test_an_engine_or_a_database_that_is_stopped(served: Service, engine, postgres: PostgresServer) -> None:
    assert ready(served) == (200, "1 engines up")
    engine[1].suspend()
    until(lambda: ready(served) == (503, "no engine answers"))
    engine[1].resume()
    until(lambda: ready(served)[0] == 200)
    with postgres.frozen():
        until(lambda: ready(served) == (503, "the database has not answered for 2 s"))
        until(lambda: ready(served) == (503, "the database has not answered for more than 2 s"))
        assert httpx.get(served.url + "/healthz", timeout=30).status_code == 200, "the process itself answers"
    until(lambda: ready(served)[0] == 200)

"""A real `relax serve` with its engine, started once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_server import postgres  # noqa: F401  (fixture)
from rollout_bench import bench, processor  # noqa: F401  (fixtures)
from service_process import MANY_REFUSALS, Service, start


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Without keys, at a loopback address."""
    it = start(tmp_path_factory.mktemp("service"), "--drain-seconds", "1", *MANY_REFUSALS)
    yield it
    it.stop()


@pytest.fixture(scope="session")
def locked(tmp_path_factory: pytest.TempPathFactory, service: Service) -> Iterator[Service]:
    """With keys; it shares the engine of `service`."""
    from relax_server.api.keys import KeyRing
    from relax_server.journal.sql import SqlJournal

    folder = tmp_path_factory.mktemp("locked")
    journal = SqlJournal(folder / "journal.db")
    secret, _ = KeyRing(journal).create("root", ["admin"])
    journal.close()
    with service.client() as client:
        engine = client.get("/v1/models").json()["engines"][0]["url"]
    it = start(folder, "--engine", engine, "--drain-seconds", "1", *MANY_REFUSALS, key=secret)
    yield it
    it.stop()


@pytest.fixture(scope="session")
def sandbox() -> None:
    """What uploads code is skipped where no service would run it."""
    from relax_server.api.environments.sandbox import Sandbox, SandboxUnavailable

    try:
        asyncio.run(Sandbox(Path("/nonexistent")).require())
    except SandboxUnavailable as error:
        pytest.skip(str(error))

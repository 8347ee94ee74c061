"""Fixtures of the contract suites."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from journal_calls import Open
from postgres_server import postgres
from relax_server.journal import open_journal
from relax_server.journal.base import Journal
from sample_groups import ManualClock

if TYPE_CHECKING:
    from engine_contract import Served

__all__ = ["postgres"]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["sqlite", "postgres"])
def open_again(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Open]:
    """Opens the same journal, as often as it is called: each time like another process."""
    opened: list[Journal] = []
    where = tmp_path / "journal.db" if request.param == "sqlite" else request.getfixturevalue("postgres").make()

    def open_(claim: str | None = None) -> Journal:
        opened.append(open_journal(where, claim=claim, clock=clock))
        return opened[-1]

    yield open_
    for journal in opened:
        journal.close()


@pytest.fixture
def journal(open_again: Open) -> Journal:
    return open_again()


@pytest_asyncio.fixture(loop_scope="package", scope="package", params=["embedded", "sglang", "vllm"])
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    from engine_contract import serve  # imports torch, which the other suites do without

    async with serve(request.param, tmp_path_factory.mktemp("engine")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="package")
async def fresh(served: Served) -> AsyncIterator[None]:
    """Every test begins with version 0, an empty cache and a running engine."""
    yield
    await served.engine.abort(None)
    await served.engine.resume()
    await served.engine.update_weights(str(served.old.processor.path), 0)


@pytest.fixture
def takes_media(served: Served) -> None:
    if not served.takes_media:
        pytest.skip("vLLM serves text models here")

"""The event loop is watched: what holds it is measured, and named."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from relax_server.api.loop_watch import LONG, LoopWatch


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(100))


async def handle(scope: dict[str, str]) -> None:
    compute(0.4)


async def watched(registry: CollectorRegistry, hold) -> LoopWatch:
    watch = LoopWatch(registry)
    watch.start()
    await asyncio.sleep(0.1)
    await hold()
    await asyncio.sleep(0.1)
    watch.stop()
    return watch


async def test_what_holds_the_loop_is_measured_and_named(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    with caplog.at_level(logging.WARNING):
        watch = await watched(
            registry, lambda: handle({"method": "POST", "path": "/v1/sessions/s_1/openai/v1/chat/completions"})
        )
    assert watch.longest_lag > 0.3 and watch.longest_held > 0.3
    lines = [record.getMessage() for record in caplog.records if "event loop" in record.getMessage()]
    assert any("POST /v1/sessions/s_1/openai/v1/chat/completions" in line for line in lines), lines
    metrics = generate_latest(registry).decode()
    rows = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    for name in ("relax_loop_lag_seconds", "relax_loop_held_seconds"):
        assert float(rows[f'{name}_bucket{{le="0.25"}}']) < float(rows[f"{name}_count"]), "one was longer"


async def test_waiting_in_the_loop_delays_it_but_computes_nothing() -> None:
    async def block() -> None:
        time.sleep(0.3)  # noqa: ASYNC251

    watch = await watched(CollectorRegistry(), block)
    assert watch.longest_lag > 0.2 and watch.longest_held < LONG


async def test_computing_in_a_thread_does_not_count_as_the_loops() -> None:
    async def beside() -> None:
        await asyncio.to_thread(compute, 0.3)

    watch = await watched(CollectorRegistry(), beside)
    assert watch.longest_held < LONG

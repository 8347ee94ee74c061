"""What every engine promises of pauses, aborts, its memory and what it says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from engine_contract import ENGINE_TESTS, TIMEOUT, Served, film
from relax_server.engines.http import HttpEngine
from relax_server.engines.sglang.client import SglangEngine
from relax_server.engines.vllm.client import VllmEngine

from relax_sdk.errors import EngineAborted, EngineDenied, EngineError, EngineUnavailable

pytestmark = ENGINE_TESTS


async def test_pause_holds_requests_until_resume(served: Served):
    await served.engine.pause("in_place")
    waiting = asyncio.ensure_future(served.one(served.request(["wait"])))
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done
    await served.engine.resume()
    served.old.check(await waiting)


async def test_pause_with_abort_ends_what_runs(served: Served):
    stream = served.engine.stream(served.request(["endless"], max_new_tokens=2000), TIMEOUT)
    await anext(stream)
    with pytest.raises(EngineAborted, match="abort"):
        await served.engine.pause("abort")
        async for _ in stream:
            pass


async def test_abort_ends_one_request_and_leaves_the_others(served: Served):
    stream = served.engine.stream(served.request(["mine"], max_new_tokens=2000, rid="mine"), TIMEOUT)
    await anext(stream)
    other = asyncio.ensure_future(served.one(served.request(["other"], max_new_tokens=100, rid="other")))
    await served.engine.abort("mine")
    with pytest.raises(EngineAborted):
        async for _ in stream:
            pass
    assert len((await other).response_ids) == 100
    assert (await served.engine.server_info())["running"] == 0


async def test_abort_takes_names_as_they_are(served: Served):
    streams = [
        served.engine.stream(served.request(["long"], max_new_tokens=600, rid=rid), TIMEOUT) for rid in ("job-1", "job-10")
    ]
    for stream in streams:
        await anext(stream)
    await served.engine.abort("job-1")
    with pytest.raises(EngineAborted):
        async for _ in streams[0]:
            pass
    async for part in streams[1]:
        last = part
    assert len(last.response_ids) == 600


async def test_release_gives_memory_back_and_resume_needs_weights(served: Served):
    engine = served.engine
    if isinstance(engine, SglangEngine | VllmEngine):  # on CPU they cannot
        with pytest.raises(EngineError, match=r"--enable-memory-saver|--enable-sleep-mode"):
            await engine.release_memory()
        return
    await engine.release_memory()
    with pytest.raises(EngineUnavailable, match="released"):
        await served.one(served.request(["none"]))
    await engine.resume_memory()
    await engine.update_weights(str(served.new.processor.path), 2)
    served.new.check(await served.one(served.request([film(), "back"])), [film()])


async def test_health_and_info(served: Served):
    assert await served.engine.health()
    assert not await HttpEngine("http://127.0.0.1:9").health()
    info = await served.engine.server_info()
    assert info["running"] == 0 and info["waiting"] == 0 and "cached_tokens" in info
    assert (await served.engine.model_info())["model_path"]
    await served.one(served.request(["cache me"]))
    await served.engine.flush_cache()
    assert (await served.one(served.request(["cache me"]))).cached_tokens == 0


async def test_strangers_are_told_its_health_and_nothing_else(served: Served):
    calls: list[Callable[[HttpEngine], Awaitable[object]]] = [
        lambda stranger: stranger.generate(served.request(["mine"]), TIMEOUT),
        lambda stranger: stranger.update_weights(str(served.new.processor.path), 666),
        lambda stranger: stranger.pause("abort"),
        lambda stranger: stranger.resume(),
        lambda stranger: stranger.release_memory(),
        lambda stranger: stranger.resume_memory(),
        lambda stranger: stranger.abort(None),
        lambda stranger: stranger.flush_cache(),
        lambda stranger: stranger.server_info(),
        lambda stranger: stranger.model_info(),
    ]
    for stranger in (HttpEngine(served.engine.url), HttpEngine(served.engine.url, token="x" * 40)):
        assert await stranger.health()
        for call in calls:
            with pytest.raises(EngineDenied):
                await call(stranger)
        await stranger.close()
    served.old.check(await served.one(served.request(["as before"])))


async def test_a_memory_that_was_released_in_a_pause_comes_back_as_a_colocated_run_brings_it_back(served: Served):
    engine = served.engine
    if isinstance(engine, SglangEngine | VllmEngine):  # on CPU they cannot
        return
    for version, reference in ((3, served.new), (4, served.old)):
        await engine.pause("abort")
        await engine.release_memory()
        await engine.resume_memory()
        await engine.update_weights(str(reference.processor.path), version)
        await engine.resume()
        reference.check(await served.one(served.request([film(), "back"])), [film()])

"""What every engine promises of weight updates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from engine_contract import ENGINE_TESTS, PROMPTS, TIMEOUT, Served, picture, sound
from relax_server.engines.base import Generation
from relax_server.engines.vllm.client import VllmEngine
from relax_server.models.catalog import resolve_model

from relax_sdk.errors import EngineError
from relax_sdk.media import Media

pytestmark = ENGINE_TESTS


async def test_media_seen_before_an_update_go_through_the_new_towers(served: Served):
    content = PROMPTS["all"]
    media = [part for part in content if isinstance(part, Media)]
    request = served.request(content, max_new_tokens=16)
    served.old.check(await served.one(request), media)
    await served.engine.update_weights(str(served.new.processor.path), 7)
    after = await served.one(request)
    served.new.check(after, media)
    assert [(s.version, s.start, s.end) for s in after.weight_versions] == [(7, 0, 16)]
    assert after.cached_tokens == 0
    assert (await served.engine.model_info())["weight_version"] == "7"


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(served: Served, tmp_path):
    with pytest.raises(EngineError, match="safetensors"):
        await served.engine.update_weights(str(tmp_path), 3)
    with pytest.raises(EngineError, match="weight"):
        await served.engine.update_weights(str(resolve_model("relax/tiny-llama")), 3)
    generation = await served.one(served.request(["still"]))
    served.old.check(generation)
    assert generation.weight_versions[0].version == 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_an_update_in_the_middle_of_a_response_splits_its_versions(served: Served, mode):
    request = served.request([picture(), "a long story"], max_new_tokens=300)
    part: Generation | None = None
    async for part in served.engine.stream(request, TIMEOUT):
        if len(part.response_ids) >= 5 and len(part.weight_versions) == 1:
            await served.engine.pause(mode)
            await served.engine.update_weights(str(served.new.processor.path), 1)
            await served.engine.resume()
    assert part is not None and len(part.response_ids) == 300
    assert [s.version for s in part.weight_versions] == [0, 1]
    cut = part.weight_versions[0].end
    assert 5 <= cut < 300
    before = served.old.logprobs(part.prompt_ids, part.response_ids[:cut], [picture()])
    np.testing.assert_allclose(part.logprobs[:cut], before, atol=1e-4)
    after = served.new.logprobs(part.prompt_ids, part.response_ids, [picture()])[cut:]
    gap = np.abs(after - part.logprobs[cut:]).max()
    # In place, old keys and values are still attended; not with vLLM, where an update lets all begin again from their tokens.
    assert gap <= 1e-4 if mode == "retract" or isinstance(served.engine, VllmEngine) else gap > 1e-3


async def test_an_update_does_not_wait_for_what_runs(served: Served):
    """Nobody pauses here: requests go on across the update, those that come after it begin with the new weights."""
    long = [served.request([sound(), f"story {i}"], max_new_tokens=400, rid=f"long-{i}.") for i in range(5)]
    streams = [served.engine.stream(request, TIMEOUT) for request in long]

    async def read(stream: AsyncIterator[Generation], tokens: int) -> Generation:
        async for part in stream:
            if len(part.response_ids) >= tokens:
                return part
        raise AssertionError(f"it ended before it had {tokens} tokens")

    await asyncio.gather(*(read(stream, 5) for stream in streams))
    running = [asyncio.create_task(read(stream, 400)) for stream in streams]
    await served.engine.update_weights(str(served.new.processor.path), 1)
    after = await served.one(served.request([sound(), "later"]))
    served.new.check(after, [sound()])
    assert [span.version for span in after.weight_versions] == [1]
    assert not all(future.done() for future in running)
    for generation in await asyncio.gather(*running):
        assert len(generation.response_ids) == 400
        assert [span.version for span in generation.weight_versions] == [0, 1]

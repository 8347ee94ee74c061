"""What every engine promises of its answers: tokens, logprobs, seeds, cached prefixes, streams and routed experts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from engine_contract import ENGINE_TESTS, PROMPTS, TIMEOUT, Served, film, picture, sound
from relax_server.engines.sglang.client import SglangEngine
from relax_server.engines.vllm.client import VllmEngine

from relax_sdk.media import Media

pytestmark = ENGINE_TESTS


@pytest.mark.parametrize("name", PROMPTS)
async def test_logprobs_are_the_model_s_with_and_without_cached_prefix(served: Served, name: str):
    request = served.request(PROMPTS[name])
    media = [part for part in PROMPTS[name] if isinstance(part, Media)]
    if media and not served.takes_media:
        pytest.skip("vLLM serves text models here")
    first = await served.one(request)
    again = await served.one(request)
    assert first.prompt_ids == served.old.processor.expand(request.input_ids, served.old.features(media))
    assert first.cached_tokens < again.cached_tokens == served.found_again(len(first.prompt_ids) - 1)
    for generation in (first, again):
        assert len(generation.response_ids) == 6 and generation.finish_reason == "length"
        served.old.check(generation, media)


async def test_different_media_never_share_a_prefix(served: Served, takes_media: None):
    await served.one(served.request([picture(5), "?"]))
    other = await served.one(served.request([picture(6), "?"]))
    served.old.check(other, [picture(6)])
    placeholder = served.old.processor.placeholder_ids["image"]
    assert other.cached_tokens == other.prompt_ids.index(placeholder)


async def test_turns_share_their_history(served: Served):
    """Three turns, the second and third with new media; each prompt is the last prompt, its response and new tokens."""
    processor = served.old.processor
    media: list[Media] = [picture(3)]
    rendered = processor.render([served.message([media[0], "look"])])
    wire, answered = list(rendered.ids), 0
    for follow in (sound(3), film(3), None):
        generation = await served.one(served.raw(wire, media))
        served.old.check(generation, media)
        assert generation.cached_tokens >= served.found_again(answered)
        answered = len(generation.prompt_ids) + len(generation.response_ids) - 1
        wire = processor.collapse(generation.prompt_ids) + generation.response_ids
        if follow is not None:
            wire += processor.render_append([served.message([follow, "and?"])], closed=False).ids
            media.append(follow)


async def test_n_answers_differ_and_each_is_right(served: Served):
    request = served.request([picture(4), "draw four"], n=4)
    generations = await served.engine.generate(request, TIMEOUT)
    assert len({tuple(g.response_ids) for g in generations}) == 4
    for generation in generations:
        served.old.check(generation, [picture(4)])


async def test_a_seed_gives_the_same_answer_whatever_else_is_in_the_batch(served: Served):
    async def asked(content: Sequence[Media | str], seed: int | None, tokens: int = 24, **sampling: float) -> list[int]:
        request = served.request(content, max_new_tokens=tokens, sampling_seed=seed, **sampling)
        (answer,) = await served.engine.generate(request, TIMEOUT)
        assert answer.seeded
        return answer.response_ids

    def again() -> list[Awaitable[list[int]]]:
        return [*(asked(["say a number"], seed) for seed in (7, 8)), asked(["say a number"], 7, top_p=0.9, top_k=50)]

    alone = [await answer for answer in again()]
    assert alone[0] != alone[1]
    others = [asked([picture(), f"request {i}"], None if i % 2 else i, 8 + 7 * i) for i in range(6)]
    among = await asyncio.gather(*others, *again(), asked(["say a number"], None))
    assert among[-4:-1] == alone and among[-1] not in alone
    # Those of an evaluation, and of a user who samples otherwise.
    otherwise = [asked(["count"], None, 60, temperature=0.0), asked(["count"], 7, 60, top_p=0.5)]
    assert (await asyncio.gather(*otherwise, *again()))[2:] == alone


async def test_concurrent_requests_of_mixed_lengths_and_kinds(served: Served):
    rng = np.random.default_rng(7)
    cases: list[tuple[list[Media | str], int]] = []
    for i in range(30):
        content: list[Media | str] = ["x" * int(rng.integers(1, 400))]
        if i % 3 == 1:
            content.append([picture, sound, film][i % 9 // 3](i % 4))
        cases.append((content, int(rng.integers(1, 30))))
    requests = [served.request(content, max_new_tokens=n) for content, n in cases]
    answers = await asyncio.gather(*(served.one(r) for r in requests))
    for (content, n), generation in zip(cases, answers, strict=True):
        assert len(generation.response_ids) == n
        served.old.check(generation, [part for part in content if isinstance(part, Media)])


async def test_a_group_that_arrives_at_once(served: Served):
    request = served.request([film(4), "sixteen samples of what is to be seen here"])
    answers = await asyncio.gather(*(served.one(request) for _ in range(16)))
    for generation in answers:
        served.old.check(generation, [film(4)])
    shared = sum(g.cached_tokens > 0 for g in answers)
    # SGLang and vLLM compute the prompt again for those that arrive before they have begun with the first
    assert 1 <= shared <= 15 if isinstance(served.engine, SglangEngine | VllmEngine) else shared == 15


async def test_temperature_and_greedy(served: Served):
    warm = await served.one(served.request(["warm"], temperature=0.5))
    served.old.check(warm, temperature=0.5)
    greedy = await served.one(served.request(["cold"], temperature=0.0))
    served.old.check(greedy)
    logits = served.old.logits([*greedy.prompt_ids, *greedy.response_ids])[len(greedy.prompt_ids) - 1 : -1]
    assert logits.argmax(-1).tolist() == greedy.response_ids
    only = await served.one(served.request(["cold"], top_k=1))
    assert only.response_ids == greedy.response_ids
    nucleus = await served.one(served.request(["cold"], top_p=1e-6))
    assert nucleus.response_ids == greedy.response_ids


@pytest.mark.parametrize("cut", [{"top_k": 20}, {"top_p": 0.7}, {"top_k": 60, "top_p": 0.8}], ids=str)
async def test_logprobs_are_of_the_distribution_that_was_sampled_from(served: Served, cut: dict[str, float]):
    """After the cut; SGLang reports them from before it, which is why runs with it take no cut.

    SGLang also makes both cuts from the whole distribution, where the others make `top_p` from what `top_k` leaves: with both,
    other tokens are left.
    """
    generation = await served.one(served.request(["among few"], temperature=0.7, max_new_tokens=24, **cut))
    reported = {} if isinstance(served.engine, SglangEngine) else cut
    served.old.check(generation, temperature=0.7, **reported)
    whole, left = (served.old.logprobs(generation.prompt_ids, generation.response_ids, temperature=0.7, **c) for c in ({}, cut))
    if not (isinstance(served.engine, SglangEngine) and len(cut) > 1):
        assert np.isfinite(left).all() and (left - whole).min() > 0.05


async def test_stop_tokens_end_a_response(served: Served):
    greedy = await served.one(served.request(["until"], temperature=0.0, max_new_tokens=12))
    stop = greedy.response_ids[5]
    until = {"temperature": 0.0, "max_new_tokens": 12, "stop_token_ids": (stop,), "ignore_eos": False}
    cut = await served.one(served.request(["until"], **until))
    assert cut.finish_reason == "stop"
    assert cut.response_ids == greedy.response_ids[: greedy.response_ids.index(stop) + 1]


async def test_streaming_grows_to_the_whole_answer(served: Served):
    request = served.request([sound(4), "say it slowly"], temperature=0.0, max_new_tokens=20)
    whole = await served.one(request)
    parts = [part async for part in served.engine.stream(request, TIMEOUT)]
    assert parts[-1].response_ids == whole.response_ids and parts[-1].finish_reason == "length"
    np.testing.assert_allclose(parts[-1].logprobs, whole.logprobs, atol=1e-5)
    for before, after in pairwise(parts):
        assert after.response_ids[: len(before.response_ids)] == before.response_ids
        assert not before.finish_reason
    assert len(parts) > 1


async def test_routed_experts_are_the_model_s(served: Served, takes_media: None):
    content = PROMPTS["all"]
    media = [part for part in content if isinstance(part, Media)]
    request = served.request(content, return_routed_experts=True)
    for _ in range(2):  # computed, then from the cache
        generation = await served.one(request)
        assert generation.routed_experts is not None and generation.routed_shape is not None
        ids = [*generation.prompt_ids, *generation.response_ids][:-1]
        routes = np.frombuffer(generation.routed_experts, np.int32).reshape(generation.routed_shape)
        expected = served.old.routes(ids, media)
        assert routes.shape == expected.shape
        assert (np.sort(routes, -1) == np.sort(expected, -1)).all()

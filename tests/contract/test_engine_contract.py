"""What every engine promises, whatever runs behind its HTTP contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from engine_reference import Reference
from relax_server.engines.base import GenerateRequest, Generation, MediaItem
from relax_server.engines.http import HttpEngine
from relax_server.engines.process import EngineProcess
from relax_server.engines.settings import EngineSettings
from relax_server.engines.sglang.client import SglangEngine
from relax_server.engines.sglang.environment import find_python
from relax_server.engines.sglang.process import SglangProcess
from relax_server.engines.vllm.client import VllmEngine
from relax_server.engines.vllm.environment import VENV
from relax_server.engines.vllm.process import BLOCK, VllmProcess
from relax_server.models.catalog import resolve_model
from relax_server.models.layout import routed_shape

from relax_sdk import Audio, Image, Message, Text, Video
from relax_sdk.config import SamplingParams
from relax_sdk.errors import ConfigError, EngineAborted, EngineError, EngineUnavailable
from relax_sdk.media import Media, MediaStore

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
TIMEOUT = 60.0


@dataclass
class Served:
    """A running engine of a tiny model, weights of seed 0 as version 0 and of seed 1 to update to.

    Where it serves text, prompts are asked without their media.
    """

    engine: HttpEngine
    store: MediaStore
    old: Reference
    new: Reference

    def request(self, content: Sequence[Media | str], **options) -> GenerateRequest:
        """A chat prompt of parts and strings; `options` are of GenerateRequest, or else of SamplingParams."""
        rendered = self.old.processor.render([self.message(content)])
        return self.raw(rendered.ids, rendered.media, **options)

    @property
    def takes_media(self) -> bool:
        return self.old.processor.is_omni

    def message(self, content: Sequence[Media | str]) -> Message:
        parts = [Text(part) if isinstance(part, str) else part for part in content]
        return Message("user", tuple(part for part in parts if self.takes_media or isinstance(part, Text)))

    def found_again(self, tokens: int) -> int:
        """How many tokens of a prefix are taken from the cache."""
        return tokens // BLOCK * BLOCK if isinstance(self.engine, VllmEngine) else tokens

    def raw(self, ids: list[int], media: Sequence[Media] = (), **options) -> GenerateRequest:
        own = {k: options.pop(k) for k in ("n", "rid", "return_routed_experts") if k in options}
        items = tuple(MediaItem(m.ref, str(self.store.path(self.store.put(m)))) for m in media if self.takes_media)
        return GenerateRequest(ids, SamplingParams(**{"ignore_eos": True, "max_new_tokens": 6, **options}), items, **own)

    async def one(self, request: GenerateRequest) -> Generation:
        return (await self.engine.generate(request, TIMEOUT))[0]


class TextReference(Reference):
    """A text model, which is given no media."""

    def features(self, media: Sequence[Media]) -> list:
        return []


async def start_embedded(folder: Path, media_root: Path) -> tuple[HttpEngine, Callable[[], Awaitable[None]]]:
    process = EngineProcess(
        resolve_model("relax/tiny-omni"),
        folder / "engine.log",
        EngineSettings(media_root=media_root, max_total_tokens=16_384, return_routed_experts=True),
    )
    await process.start(timeout=120)
    return HttpEngine(process.url), process.stop


async def start_sglang(folder: Path, media_root: Path) -> tuple[HttpEngine, Callable[[], Awaitable[None]]]:
    try:
        find_python()
    except ConfigError as error:
        pytest.skip(str(error))
    model = resolve_model("relax/tiny-omni")
    process = SglangProcess(
        model, folder / "sglang.log", EngineSettings(media_root=media_root, max_total_tokens=16_384, return_routed_experts=True)
    )
    await process.start(timeout=500)
    return SglangEngine(process.url, routed_shape=routed_shape(model)), process.stop


async def start_vllm(folder: Path, media_root: Path) -> tuple[HttpEngine, Callable[[], Awaitable[None]]]:
    try:
        VENV.find()
    except ConfigError as error:
        pytest.skip(str(error))
    process = VllmProcess(resolve_model("relax/tiny-qwen3"), folder / "vllm.log", EngineSettings(max_total_tokens=16_384))
    await process.start(timeout=500)
    return VllmEngine(process.url), process.stop


FACTORIES = {"embedded": start_embedded, "sglang": start_sglang, "vllm": start_vllm}


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=FACTORIES)
async def served(request, tmp_path_factory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("engine")
    store = MediaStore(folder / "media")
    engine, stop = await FACTORIES[request.param](folder, store.root)
    kind, model = (TextReference, "relax/tiny-qwen3") if request.param == "vllm" else (Reference, "relax/tiny-omni")
    old, new = (kind(resolve_model(model, seed)) for seed in (0, 1))
    yield Served(engine, store, old, new)
    await engine.close()
    await stop()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
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


def picture(seed: int = 0) -> Image:
    return Image.from_array(np.random.default_rng(seed).integers(0, 255, (64, 96, 3), dtype=np.uint8))


def sound(seed: int = 0, seconds: float = 1.3) -> Audio:
    return Audio.from_array(0.5 * np.sin(np.arange(int(16_000 * seconds)) * (0.05 + 0.02 * seed)))


def film(seed: int = 0) -> Video:
    return Video.from_array(np.random.default_rng(seed).integers(0, 255, (6, 64, 64, 3), dtype=np.uint8), fps=3)


PROMPTS: dict[str, list[Media | str]] = {
    "text": ["name a colour that is neither red nor green"],
    "image": [picture(), "what is this?"],
    "two images": [picture(), "and", picture(1), "?"],
    "audio": [sound(), "what do you hear?"],
    "video": [film(), "which way?"],
    "all": [picture(2), "with", sound(1), "and", film(1), "then", sound(2, 2.1), "."],
}


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
    async def asked(content: Sequence[Media | str], seed: int | None, tokens: int = 24) -> list[int]:
        request = served.request(content, max_new_tokens=tokens, sampling_seed=seed)
        (answer,) = await served.engine.generate(request, TIMEOUT)
        assert answer.seeded
        return answer.response_ids

    alone = [await asked(["say a number"], seed) for seed in (7, 8)]
    assert alone[0] != alone[1]
    others = (asked([picture(), f"request {i}"], None if i % 2 else i, 8 + 7 * i) for i in range(6))
    among = await asyncio.gather(*others, *(asked(["say a number"], seed) for seed in (7, 8, 7, None)))
    assert among[-4:-1] == [alone[0], alone[1], alone[0]] and among[-1] not in alone


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
    """After the cut; SGLang reports them from before it, which is why runs with it take no cut."""
    generation = await served.one(served.request(["among few"], temperature=0.7, max_new_tokens=24, **cut))
    reported = {} if isinstance(served.engine, SglangEngine) else cut
    served.old.check(generation, temperature=0.7, **reported)
    whole, left = (served.old.logprobs(generation.prompt_ids, generation.response_ids, temperature=0.7, **c) for c in ({}, cut))
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


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("../../etc/passwd", "no such file"),
        ("/etc/passwd", "no such file"),
        ("missing.png", "no such file"),
        ("https://example.com/a.png", "not fetched"),
        ("data:image/png;base64,AAAA", "not a readable image"),
        ("data:image/png;base64,!", "base64"),
        ("data:image/png,AAAA", "data URI"),
    ],
)
async def test_bad_media_are_refused_with_a_reason(served: Served, takes_media: None, url: str, says: str):
    image = picture()
    good = served.request([image, "?"])
    bad = GenerateRequest(good.input_ids, good.sampling, (MediaItem(image.ref, url),))
    with pytest.raises(EngineError, match=says):
        await served.engine.generate(bad, TIMEOUT)


async def test_placeholders_and_media_must_agree(served: Served, takes_media: None):
    request = served.request([picture(), "?"])
    for media in ((), request.media * 2):
        with pytest.raises(EngineError, match=r"image.*1") as caught:
            await served.engine.generate(GenerateRequest(request.input_ids, request.sampling, media), TIMEOUT)
        assert not isinstance(caught.value, EngineUnavailable)
    expanded = served.old.processor.expand(request.input_ids, served.old.features([picture()]))
    with pytest.raises(EngineError, match="one placeholder per media item"):
        await served.engine.generate(GenerateRequest(expanded, request.sampling, request.media), TIMEOUT)


async def test_what_can_never_fit_is_refused(served: Served):
    with pytest.raises(EngineError, match="tokens") as caught:
        await served.one(served.request(["x" * 4000], max_new_tokens=1000))
    assert not isinstance(caught.value, EngineUnavailable)


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


async def test_an_engine_that_does_not_answer_in_time_is_unavailable(served: Served):
    with pytest.raises(EngineUnavailable, match="within"):
        await served.engine.generate(served.request(["slow"], max_new_tokens=3000), 0.2)
    assert len((await served.one(served.request(["next"]))).response_ids) == 6
    with pytest.raises(EngineUnavailable):
        await HttpEngine("http://127.0.0.1:9").generate(served.request(["nobody"]), 5)

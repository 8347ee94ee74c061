"""Architectures in real SGLang: logprobs are those of transformers, before and after an update of the weights."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from engine_contract import film, picture
from engine_reference import Reference
from relax_server.engines.base import GenerateRequest, MediaItem
from relax_server.engines.settings import EngineSettings
from relax_server.engines.sglang.client import SglangEngine
from relax_server.engines.sglang.process import SglangProcess
from relax_server.models.catalog import resolve_model
from relax_server.models.families import TABLE

from relax_sdk import Message, Text
from relax_sdk.config import SamplingParams
from relax_sdk.errors import EngineError
from relax_sdk.media import Media

HERE = [name for name, family in TABLE.items() if family.sglang == "tested" and name not in ("Llama", "Qwen3-Omni thinker")]
"""The two others have suites of their own."""
PROMPTS: list[list[Media | str]] = [
    ["name a colour that is neither red nor green"],
    [picture(), "and", picture(1), "differ?"],
    [film(), "which way?"],
    [film(1), "after", picture(2), "and", film(), "."],
]


def asked(reference: Reference, parts: list[Media | str], n: int) -> tuple[GenerateRequest, list[Media]]:
    """A request with what the parts say, and its media."""
    rendered = reference.processor.render([Message("user", tuple(Text(p) if isinstance(p, str) else p for p in parts))])
    media = tuple(MediaItem(item.ref, item.data_uri()) for item in rendered.media)
    return GenerateRequest(rendered.ids, SamplingParams(max_new_tokens=6, ignore_eos=True), media, n), list(rendered.media)


async def check(engine: SglangEngine, reference: Reference) -> None:
    """All prompts at once, twice: the second time their beginnings are in the cache."""
    taken = [p for p in PROMPTS if {m.kind for m in p if isinstance(m, Media)} <= reference.processor.modalities]
    assert len(taken) == (4 if reference.processor.modalities else 1)
    for _ in range(2):
        requests = [asked(reference, parts, 2) for parts in taken]
        answers = await asyncio.gather(*(engine.generate(request, 120) for request, _ in requests))
        for (_, media), generations in zip(requests, answers, strict=True):
            for generation in generations:
                assert not set(generation.response_ids) & set(reference.processor.banned_ids)
                reference.check(generation, media)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", HERE)
async def test_logprobs_are_those_of_transformers(name: str, sglang: None, tmp_path: Path) -> None:
    tiny = TABLE[name].tiny
    process = SglangProcess(tiny, tmp_path / "log", EngineSettings(max_total_tokens=8192))
    await process.start(400)
    engine = SglangEngine(process.url, token=process.token, inline_media=True)
    try:
        await check(engine, Reference(resolve_model(tiny)))
        other = Reference(resolve_model(tiny, 1))
        await engine.update_weights(str(other.processor.path), 1)
        await check(engine, other)
        if other.processor.modalities:
            request, _ = asked(other, PROMPTS[1], 1)
            with pytest.raises(EngineError, match="placeholder"):
                await engine.generate(dataclasses.replace(request, media=request.media[:1]), 60)
    finally:
        await engine.close()
        await process.stop()

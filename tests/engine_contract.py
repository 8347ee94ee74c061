"""Engines of tiny models for the contract suite: how each is started, what it is asked, and what is right."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
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
from relax_sdk.errors import ConfigError
from relax_sdk.media import Media, MediaStore

ENGINE_TESTS = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("fresh"),
]
"""Marks of all tests of the contract: they share the engines, as starting one takes long."""


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
        return bool(self.old.processor.modalities)

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
    return HttpEngine(process.url, token=process.token), process.stop


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
    return SglangEngine(process.url, token=process.token, routed_shape=routed_shape(model)), process.stop


async def start_vllm(folder: Path, media_root: Path) -> tuple[HttpEngine, Callable[[], Awaitable[None]]]:
    try:
        VENV.find()
    except ConfigError as error:
        pytest.skip(str(error))
    process = VllmProcess(resolve_model("relax/tiny-qwen3"), folder / "vllm.log", EngineSettings(max_total_tokens=16_384))
    await process.start(timeout=500)
    return VllmEngine(process.url, token=process.token), process.stop


FACTORIES = {"embedded": start_embedded, "sglang": start_sglang, "vllm": start_vllm}


@contextlib.asynccontextmanager
async def serve(kind: str, folder: Path) -> AsyncIterator[Served]:
    """An engine of a kind that `FACTORIES` names; the test is skipped where it is not installed."""
    store = MediaStore(folder / "media")
    engine, stop = await FACTORIES[kind](folder, store.root)
    reference, model = (TextReference, "relax/tiny-qwen3") if kind == "vllm" else (Reference, "relax/tiny-omni")
    old, new = (reference(resolve_model(model, seed)) for seed in (0, 1))
    yield Served(engine, store, old, new)
    await engine.close()
    await stop()


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

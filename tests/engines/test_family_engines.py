"""Every architecture of the table in the embedded engine: its logprobs are those of transformers on text and on its media."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_contract import film, picture, sound
from engine_reference import Reference
from heard_films import heard_film
from relax_server.engines.embedded.core import Prompt, Sequence
from relax_server.engines.embedded.model import ModelRunner
from relax_server.engines.embedded.prompts import PromptBuilder
from relax_server.engines.embedded.sampling import Sampling
from relax_server.engines.embedded.scheduler import Scheduler, SchedulerConfig
from relax_server.models.catalog import resolve_model
from relax_server.models.families import TABLE, require_served

from relax_sdk import ConfigError, Message, Text
from relax_sdk.media import Media

PROMPTS: list[list[Media | str]] = [
    ["name a colour that is neither red nor green"],
    [picture(), "and", picture(1), "differ?"],
    [film(), "which way?"],
    [sound(), "what do you hear?"],
    [picture(2), "with", sound(1), "and", film(1), "then", sound(2, 2.1), "."],
    [film(1), "after", picture(2), "and", film(), "."],
]


@pytest.fixture(scope="module", params=list(TABLE))
def reference(request) -> Reference:
    return Reference(resolve_model(TABLE[request.param].tiny))


async def build(builder: PromptBuilder, parts: list[Media | str]) -> Prompt:
    message = Message("user", tuple(Text(p) if isinstance(p, str) else p for p in parts))
    rendered = builder.processor.render([message])
    media: dict = {}
    for item in rendered.media:
        media.setdefault(item.kind, []).append(item.data_uri())
    return await builder.build(rendered.ids, media)


def test_logprobs_are_those_of_transformers(reference: Reference) -> None:
    """Prompts come in chunks that cut media in two, twice, so that the second time their beginnings are in the cache."""
    processor = reference.processor
    taken = [p for p in PROMPTS if {m.kind for m in p if isinstance(m, Media)} <= processor.modalities]
    assert len(taken) == {0: 1, 2: 4, 3: 6}[len(processor.modalities)]
    builder = PromptBuilder(processor, None)
    prompts = [asyncio.run(build(builder, parts)) for parts in taken for _ in range(2)]
    runner = ModelRunner(processor.path, processor.hf_config, torch.float32, record_routes=False)
    config = SchedulerConfig(capacity=8192, eos_ids=processor.eos_ids, banned_ids=processor.banned_ids, chunk=24)
    scheduler = Scheduler(runner, config)
    items = [
        Sequence(f"r{i}", 0, p, Sampling(ignore_eos=True, max_new_tokens=6), i, lambda s: None) for i, p in enumerate(prompts)
    ]
    with torch.inference_mode():
        for at in (0, 1):
            for item in items[at::2]:
                scheduler.add(item)
            while scheduler.has_work:
                scheduler.step()
    assert scheduler.stats.cached_tokens > 0
    for item, parts in zip(items, [p for p in taken for _ in range(2)], strict=True):
        media = [m for m in parts if isinstance(m, Media)]
        gap = np.abs(reference.logprobs(item.prompt.ids, item.out_ids, media) - np.asarray(item.logprobs))
        assert gap.max() <= 2e-5, f"max {gap.max():.2e}"


@pytest.mark.parametrize("name", [n for n, f in TABLE.items() if f.media is not None and f.media.audio_in_video])
def test_films_that_are_heard_have_the_logprobs_of_transformers(name: str, tmp_path: Path) -> None:
    shutil.copytree(resolve_model(TABLE[name].tiny), tmp_path, dirs_exist_ok=True)
    (tmp_path / "relax_media.json").write_text('{"use_audio_in_video": true}')
    reference = Reference(tmp_path)
    processor = reference.processor
    parts: list[Media | str] = ["first", heard_film(), "then", picture(), "what?"]
    prompt = asyncio.run(build(PromptBuilder(processor, None), parts))
    runner = ModelRunner(processor.path, processor.hf_config, torch.float32, record_routes=False)
    config = SchedulerConfig(capacity=8192, eos_ids=processor.eos_ids, banned_ids=processor.banned_ids, chunk=24)
    scheduler = Scheduler(runner, config)
    item = Sequence("r", 0, prompt, Sampling(ignore_eos=True, max_new_tokens=6), 0, lambda s: None)
    with torch.inference_mode():
        scheduler.add(item)
        while scheduler.has_work:
            scheduler.step()
    media = [m for m in parts if isinstance(m, Media)]
    gap = np.abs(reference.logprobs(prompt.ids, item.out_ids, media) - np.asarray(item.logprobs))
    assert gap.max() <= 2e-5, f"max {gap.max():.2e}"


def test_wire_and_expanded_ids_are_each_others_inverse(reference: Reference) -> None:
    processor = reference.processor
    for parts in PROMPTS:
        media = [m for m in parts if isinstance(m, Media)]
        if {m.kind for m in media} <= processor.modalities:
            message = Message("user", tuple(Text(p) if isinstance(p, str) else p for p in parts))
            rendered = processor.render([message])
            expanded = processor.expand(rendered.ids, reference.features(media))
            assert processor.collapse(expanded) == rendered.ids
            again = processor.collapse(expanded + processor.render_append([message], closed=True).ids[:2])
            assert again[: len(rendered.ids)] == rendered.ids


def test_engines_that_do_not_serve_an_architecture_say_which_do() -> None:
    path = resolve_model("relax/tiny-qwen2.5-omni")
    with pytest.raises(
        ConfigError, match=r"engine='sglang' does not serve Qwen2.5-Omni.* to this trainer; use engine='embedded'"
    ):
        require_served(path, "sglang")
    require_served(resolve_model("relax/tiny-omni"), "sglang")
    with pytest.raises(ConfigError, match=r"engine='vllm' does not.*use engine='embedded' or engine='sglang'"):
        require_served(resolve_model("relax/tiny-omni"), "vllm")


def test_experts_that_are_stacked_as_transformers_writes_them_are_refused_where_an_engine_does_not_read_them(tmp_path) -> None:
    path = resolve_model("relax/tiny-qwen3-vl-moe")
    require_served(path, "sglang")
    TABLE["Qwen3-VL-MoE"].model_class().from_pretrained(path).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"gate_up_proj has shape \[4, 192, 128\], as trans.*reads \[4, 128, 192\], as publ"):
        require_served(tmp_path, "sglang")


def test_the_pages_have_the_tables_as_they_are() -> None:
    from relax_server.models.families.page import PAGES, written

    for file, made in PAGES.items():
        page = (Path(__file__).parents[2] / file).read_text()
        assert written(page, made) == page, "python -m relax_server.models.families.page writes it anew"

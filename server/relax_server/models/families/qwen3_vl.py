"""Qwen3-VL, dense and as a mixture of experts: it sees, and reads the time of every part of a film."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relax_server.models.families.base import Family, MediaRule, Tower
from relax_server.models.families.tiny import EXPERTS, mrope_text, vision_config
from relax_server.models.media_item import MediaFeatures
from relax_server.models.media_places import MediaTokens, Placed, grid_block, run, steps


def place(item: MediaFeatures, config: Any, tokens: MediaTokens) -> Placed:
    """Place an item as transformers does: each temporal patch of a film is a picture of its own, after the time it is shown."""
    id, merge = tokens.placeholders[item.kind], config.vision_config.spatial_merge_size
    first = np.zeros(1, np.float32)
    if item.kind == "image":
        return run(id, grid_block(item, merge, first))
    assert item.grid is not None and item.times is not None
    start, end = tokens.vision
    picture = grid_block(MediaFeatures("image", item.tensor, 0, (1, *item.grid[1:])), merge, first)
    n, width = picture.shape[1], float(picture.max()) + 1
    ids: list[int] = []
    rows: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    at = 0.0
    for number, seconds in enumerate(item.times):
        told = [*tokens.encode(f"<{seconds:.1f} seconds>"), start]
        ids += [*told, *[id] * n, end]
        rows += [np.full(len(told), -1), np.arange(number * n, (number + 1) * n), np.full(1, -1)]
        before = at + len(told)
        positions += [steps(len(told)) + np.float32(at), picture + np.float32(before), steps(1) + np.float32(before + width)]
        at = before + width + 1
    return Placed(np.array(ids, np.int64), np.concatenate(rows), np.concatenate(positions, 1), at)


def collapse(ids: Sequence[int], tokens: MediaTokens) -> list[int]:
    """Make one placeholder of each film: of all between the bracket that a message has around it and the one that closes it."""
    start, end = tokens.vision
    film = tokens.placeholders["video"]
    out: list[int] = []
    at = 0
    while at < len(ids):
        out.append(ids[at])
        at += 1
        if out[-1] != start or at == len(ids) or ids[at] in tokens.placeholders.values():
            continue
        close = next((i for i in range(at, len(ids) - 1) if ids[i] == ids[i + 1] == end), None)
        if close is not None and film in ids[at:close]:
            out.append(film)
            at = close + 1
    return out


def tiny_config(ids: Mapping[str, int], vocabulary: int) -> dict[str, Any]:
    """The configuration of a small dense model with two DeepStack layers."""
    return dict(
        text_config=mrope_text(vocabulary, interleaved=True),
        vision_config=vision_config(num_position_embeddings=256, deepstack_visual_indexes=[0, 2]),
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        vision_start_token_id=ids["vision_bos_token"],
        vision_end_token_id=ids["vision_eos_token"],
    )


def tiny_moe(ids: Mapping[str, int], vocabulary: int) -> dict[str, Any]:
    """The same with four experts; their widths tell how they are stacked."""
    dense = tiny_config(ids, vocabulary)
    return dense | {"text_config": dense["text_config"] | EXPERTS | {"moe_intermediate_size": 96}}


def _media(kind: str) -> MediaRule:
    module, name = f"{kind}.modeling_{kind}", "Qwen3VLMoe" if kind.endswith("moe") else "Qwen3VL"
    return MediaRule(
        visual=Tower(module, f"{name}VisionModel", "vision_config", "patch_embed.proj.weight"),
        audio=None,
        mrope="interleaved",
        place=place,
        collapse=collapse,
        tells_times=True,
        hf_seconds=None,
        hf_types=True,
        video_processor="Qwen3VLVideoProcessor",
    )


QWEN3_VL = Family(
    name="Qwen3-VL",
    models="Qwen3-VL-2B to 32B",
    model_type="qwen3_vl",
    cls="Qwen3VLForConditionalGeneration",
    tiny="relax/tiny-qwen3-vl",
    tiny_config=tiny_config,
    qk_norm=True,
    media=_media("qwen3_vl"),
    sglang="tested",
)

QWEN3_VL_MOE = Family(
    name="Qwen3-VL-MoE",
    models="Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B",
    model_type="qwen3_vl_moe",
    cls="Qwen3VLMoeForConditionalGeneration",
    tiny="relax/tiny-qwen3-vl-moe",
    tiny_config=tiny_moe,
    qk_norm=True,
    media=_media("qwen3_vl_moe"),
    transposes_experts=True,
    sglang="tested",
)

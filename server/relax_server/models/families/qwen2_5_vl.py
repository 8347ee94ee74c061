"""Qwen2.5-VL: it sees, through a tower whose layers mostly look at windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from relax_server.models.families.base import Family, MediaRule, Tower
from relax_server.models.families.tiny import mrope_text, vision_config
from relax_server.models.media_item import MediaFeatures
from relax_server.models.media_places import MediaTokens, Placed, grid_block, run


def place(item: MediaFeatures, config: Any, tokens: MediaTokens) -> Placed:
    """Place an item as `get_rope_index` of transformers does: times are whole numbers, and after an item the count goes on at
    its longer side, however long the film."""
    assert item.grid is not None
    vision = config.vision_config
    pace = 1.0 if item.second_per_grid is None else vision.tokens_per_second * item.second_per_grid
    times = np.floor(np.arange(item.grid[0], dtype=np.float32) * np.float32(pace))
    block = grid_block(item, vision.spatial_merge_size, times)
    return run(tokens.placeholders[item.kind], block, max(item.grid[1:]) // vision.spatial_merge_size)


def tiny_config(ids: Mapping[str, int], vocabulary: int) -> dict[str, Any]:
    """The configuration of a small model whose second vision layer sees all, and the others windows of 4 by 4 patches."""
    return dict(
        text_config=mrope_text(vocabulary, interleaved=False),
        vision_config=vision_config(window_size=64, fullatt_block_indexes=[1]),
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        vision_start_token_id=ids["vision_bos_token"],
        vision_end_token_id=ids["vision_eos_token"],
        tie_word_embeddings=False,
    )


QWEN2_5_VL = Family(
    name="Qwen2.5-VL",
    models="Qwen2.5-VL-3B to 72B",
    model_type="qwen2_5_vl",
    cls="Qwen2_5_VLForConditionalGeneration",
    tiny="relax/tiny-qwen2.5-vl",
    tiny_config=tiny_config,
    qkv_bias=True,
    media=MediaRule(
        visual=Tower(
            "qwen2_5_vl.modeling_qwen2_5_vl",
            "Qwen2_5_VisionTransformerPretrainedModel",
            "vision_config",
            "patch_embed.proj.weight",
        ),
        audio=None,
        mrope="blocks",
        place=place,
        hf_seconds="second_per_grid_ts",
        hf_types=True,
    ),
    sglang="tested",
)

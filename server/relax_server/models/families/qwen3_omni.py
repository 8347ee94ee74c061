"""The thinker of Qwen3-Omni: a mixture of experts that sees and hears, alone or in the folder of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from relax_server.models.families.base import Family, MediaRule, Tower, Whole
from relax_server.models.families.tiny import EXPERTS, audio_config, mrope_text, vision_config
from relax_server.models.media_item import MediaFeatures
from relax_server.models.media_places import MediaTokens, Placed, collapse_heard, grid_block, heard_film, run, steps

MODELING = "qwen3_omni_moe.modeling_qwen3_omni_moe"


def audio_tokens(n_frames: int) -> int:
    """Tokens of `n_frames` mel frames: 13 per 100, as the tower's three convolutions leave them."""
    rest = n_frames % 100
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + n_frames // 100 * 13


def place(item: MediaFeatures, config: Any, tokens: MediaTokens) -> Placed:
    """As `get_rope_index` of transformers: time is in fractions after a video, and after an item the count goes on at its
    largest coordinate."""
    id = tokens.placeholders[item.kind]
    if item.grid is None:
        return run(id, steps(item.n_tokens))
    pace = config.position_id_per_seconds * (item.second_per_grid if item.second_per_grid is not None else 1)
    times = np.arange(item.grid[0], dtype=np.float32) * np.float32(pace)
    block = grid_block(item, config.vision_config.spatial_merge_size, times)
    if item.sound is None:
        return run(id, block)
    both = np.concatenate([block, steps(item.sound.n_tokens)], 1) + np.float32(1)  # after the bracket
    order = np.argsort(both[0], kind="stable")  # a frame before the sound of the same time
    is_sound = order >= item.n_visual
    tail = order[int(np.flatnonzero(is_sound != is_sound[-1])[-1]) + 1 :]  # what is left when the other has ended
    end = float(both[:, tail].max()) + 1
    return heard_film(item, tokens, both, order, (0.0, end), end + 1)


def tiny_config(ids: Mapping[str, int], vocabulary: int) -> dict[str, Any]:
    """About 1.3M parameters, and the three DeepStack layers that SGLang needs."""
    return dict(
        text_config=mrope_text(vocabulary, interleaved=True) | EXPERTS,
        vision_config=vision_config(num_position_embeddings=256, deepstack_visual_indexes=[0, 1, 2]),
        audio_config=audio_config(downsample_hidden_size=16, n_window=50),
        audio_token_id=ids["audio_token"],
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        audio_start_token_id=ids["audio_bos_token"],
        audio_end_token_id=ids["audio_eos_token"],
        vision_start_token_id=ids["vision_bos_token"],
        vision_end_token_id=ids["vision_eos_token"],
        user_token_id=ids["u"],
        pad_token_id=ids["pad"],
    )


QWEN3_OMNI = Family(
    name="Qwen3-Omni thinker",
    models="Qwen3-Omni-30B-A3B",
    model_type="qwen3_omni_moe_thinker",
    cls="Qwen3OmniMoeThinkerForConditionalGeneration",
    tiny="relax/tiny-omni",
    tiny_config=tiny_config,
    qk_norm=True,
    media=MediaRule(
        visual=Tower(MODELING, "Qwen3OmniMoeVisionEncoder", "vision_config", "patch_embed.proj.weight"),
        audio=Tower(MODELING, "Qwen3OmniMoeAudioEncoder", "audio_config", "conv2d1.weight"),
        mrope="interleaved",
        place=place,
        collapse=collapse_heard,
        audio_tokens=audio_tokens,
        audio_in_video=True,
    ),
    whole=Whole("qwen3_omni_moe"),
    sglang="tested",
)

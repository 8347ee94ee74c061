"""The thinker of Qwen2.5-Omni: it sees and hears, alone or in the folder of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import numpy as np

from relax_server.models.families.base import Family, MediaRule, Tower, Whole
from relax_server.models.families.tiny import audio_config, mrope_text, vision_config
from relax_server.models.media_item import MediaFeatures
from relax_server.models.media_places import MediaTokens, Placed, collapse_heard, grid_block, heard_film, run, steps

MODELING = "qwen2_5_omni.modeling_qwen2_5_omni"


def audio_tokens(n_frames: int) -> int:
    """Tokens of `n_frames` mel frames, at least 3 of them: a convolution and a pooling halve their number."""
    return ((n_frames - 1) // 2 + 1 - 2) // 2 + 1


def place(item: MediaFeatures, config: Any, tokens: MediaTokens) -> Placed:
    """Place an item as `get_rope_index` of transformers does: times are whole numbers, and after an item the count goes on at
    its largest coordinate."""
    id = tokens.placeholders[item.kind]
    if item.grid is None:
        return run(id, steps(item.n_tokens))
    pace = config.position_id_per_seconds * (item.second_per_grid if item.second_per_grid is not None else 1)
    times = np.floor(np.arange(item.grid[0], dtype=np.float32) * np.float32(pace))
    block = grid_block(item, config.vision_config.spatial_merge_size, times)
    if item.sound is None:
        return run(id, block)
    size = int(config.position_id_per_seconds * config.seconds_per_chunk)
    sound = steps(item.sound.n_tokens)
    chunks = list(zip_longest(_chunks(block[0], size), _chunks(sound[0], size), fillvalue=(0, 0)))
    n = item.n_visual
    order = np.concatenate([part for (a, b), (c, d) in chunks for part in (np.arange(a, b), np.arange(n + c, n + d))])
    both = np.concatenate([block, sound], 1)
    (a, b), (c, d) = chunks[-1]
    end = float(sound[0, d - 1] if d > c else block[:, a:b].max()) + 1
    return heard_film(item, tokens, both, order, (-1.0, end), end)  # both brackets of an end have the same position


def _chunks(times: np.ndarray, size: int) -> list[tuple[int, int]]:
    """Ranges of tokens that are shown or heard within the same `size` positions, one after the other; a token that is several
    ranges later begins the next."""
    out: list[tuple[int, int]] = []
    start = 0
    for i, time in enumerate(times):
        if time >= (len(out) + 1) * size:
            out.append((start, i))
            start = i
    return [*out, (start, len(times))]


def tiny_config(ids: Mapping[str, int], vocabulary: int) -> dict[str, Any]:
    """The configuration of a small thinker."""
    return dict(
        text_config=mrope_text(vocabulary, interleaved=False) | {"tie_word_embeddings": False},
        vision_config=vision_config(window_size=64, fullatt_block_indexes=[1]),
        audio_config=audio_config(n_window=100),
        audio_token_index=ids["audio_token"],
        image_token_index=ids["image_token"],
        video_token_index=ids["video_token"],
        audio_start_token_id=ids["audio_bos_token"],
        audio_end_token_id=ids["audio_eos_token"],
        vision_start_token_id=ids["vision_bos_token"],
        vision_end_token_id=ids["vision_eos_token"],
        user_token_id=ids["u"],
        pad_token_id=ids["pad"],
        tie_word_embeddings=False,
    )


QWEN2_5_OMNI = Family(
    name="Qwen2.5-Omni thinker",
    models="Qwen2.5-Omni-3B and 7B",
    model_type="qwen2_5_omni_thinker",
    cls="Qwen2_5OmniThinkerForConditionalGeneration",
    tiny="relax/tiny-qwen2.5-omni",
    tiny_config=tiny_config,
    qkv_bias=True,
    media=MediaRule(
        visual=Tower(MODELING, "Qwen2_5OmniVisionEncoder", "vision_config", "patch_embed.proj.weight"),
        audio=Tower(MODELING, "Qwen2_5OmniAudioEncoder", "audio_config", "conv1.weight"),
        mrope="blocks",
        place=place,
        collapse=collapse_heard,
        audio_tokens=audio_tokens,
        audio_in_video=True,
        padded_sounds=True,
    ),
    whole=Whole("qwen2_5_omni", files=("spk_dict.pt",)),
)

"""Sizes of the random models that are built on the spot: three layers 128 wide, towers 64 wide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WIDTH, HEADS, TOWER, LAYERS = 128, 4, 64, 3

EXPERTS: dict[str, Any] = dict(moe_intermediate_size=WIDTH, num_experts=4, num_experts_per_tok=2)


def text_config(ids: Mapping[str, int], vocabulary: int) -> dict[str, Any]:
    """The configuration of a small language model, whatever its family.

    Args:
        ids: of tokens; `eos` and `pad` are used.
        vocabulary: tokens of the tokenizer.
    """
    return dict(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=WIDTH // HEADS,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ids["eos"],
        pad_token_id=ids["pad"],
    )


def mrope_text(vocabulary: int, *, interleaved: bool) -> dict[str, Any]:
    """The language model behind towers, with three rotary coordinates."""
    half = WIDTH // HEADS // 2
    third = half // 3
    sections = dict(mrope_interleaved=True) if interleaved else {}
    return dict(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rope_parameters=dict(
            rope_type="default", rope_theta=10_000.0, mrope_section=[half - 2 * third, third, third], **sections
        ),
    ) | (dict(head_dim=WIDTH // HEADS) if interleaved else {})


def vision_config(**more: Any) -> dict[str, Any]:
    """A vision tower of three layers over patches of 16 pixels."""
    return (
        dict(
            depth=3,
            hidden_size=TOWER,
            intermediate_size=2 * TOWER,
            num_heads=4,
            patch_size=16,
            spatial_merge_size=2,
            temporal_patch_size=2,
            out_hidden_size=WIDTH,
        )
        | more
    )


def audio_config(**more: Any) -> dict[str, Any]:
    """An audio tower of two layers over 128 mel bands."""
    return (
        dict(
            num_mel_bins=128,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=2 * TOWER,
            d_model=TOWER,
            output_dim=WIDTH,
            max_source_positions=1500,
        )
        | more
    )

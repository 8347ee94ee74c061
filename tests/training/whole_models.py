"""Folders of whole omni models, with a small talker and a small vocoder, as transformers saves them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from relax_server.models.catalog import resolve_model
from relax_server.models.families import Family

_SMALL: dict[str, Any] = dict(hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
_ROPE: dict[str, Any] = dict(rope_type="default", rope_theta=1e4, mrope_section=[6, 5, 5])
_EXPERTS: dict[str, Any] = dict(
    moe_intermediate_size=32, num_experts=2, num_experts_per_tok=1, shared_expert_intermediate_size=32
)
_SPEAKER: dict[str, Any] = dict(
    **{"emb_dim": 16, "num_embeds": 16, "enc_emb_dim": 16, "enc_dim": 16, "enc_channels": [16, 16, 16, 16, 32]},
    **{"enc_attention_channels": 8, "enc_res2net_scale": 2, "enc_se_channels": 8},
)
_OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_omni_moe": dict(
        talker_config=dict(
            text_config=_SMALL
            | _EXPERTS
            | dict(vocab_size=64, num_hidden_layers=2, rope_parameters=_ROPE | dict(mrope_interleaved=True)),
            code_predictor_config=_SMALL | dict(vocab_size=64, num_hidden_layers=2, num_code_groups=4),
            **{"thinker_hidden_size": 128, "num_code_groups": 4, "accept_hidden_layer": 1, "spatial_merge_size": 2},
        ),
        code2wav_config=dict(
            **{"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1},
            **{"intermediate_size": 32, "decoder_dim": 32, "codebook_size": 16, "num_quantizers": 4, "codebook_dim": 16},
            **{"semantic_codebook_size": 16, "upsample_rates": [2, 2], "upsampling_ratios": [2]},
        ),
    ),
    "qwen2_5_omni": dict(
        talker_config=_SMALL
        | dict(vocab_size=64, embedding_size=128, num_hidden_layers=1, rope_parameters=_ROPE, tts_codec_pad_token_id=1)
        | dict(tts_codec_start_token_id=2, tts_codec_end_token_id=3, tts_codec_mask_token_id=4),
        token2wav_config=dict(
            dit_config=dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=32) | _SPEAKER,
            bigvgan_config=dict(mel_dim=80, upsample_initial_channel=32, upsample_rates=[2, 2], upsample_kernel_sizes=[4, 4]),
        ),
    ),
}
CLASSES = {
    "qwen3_omni_moe": ("Qwen3OmniMoeConfig", "Qwen3OmniMoeForConditionalGeneration"),
    "qwen2_5_omni": ("Qwen2_5OmniConfig", "Qwen2_5OmniForConditionalGeneration"),
}


def whole_model(family: Family, folder: Path) -> Path:
    """A whole model around the family's built-in thinker."""
    import torch
    import transformers
    from transformers import AutoConfig

    assert family.whole is not None
    kind, source = family.whole.model_type, resolve_model(family.tiny)
    config, model = (getattr(transformers, name) for name in CLASSES[kind])
    thinker = AutoConfig.from_pretrained(source).to_dict()
    torch.manual_seed(0)
    whole = model(config(thinker_config=thinker, **_OTHERS[kind]))
    whole.thinker.load_state_dict(family.model_class().from_pretrained(source).state_dict())
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    whole.save_pretrained(folder, max_shard_size="2MB")
    shutil.copy(source / "generation_config.json", folder)
    for file in family.whole.files:  # the voices of the talker
        torch.save({}, folder / file)
    return folder

"""Random models of the size that is asked for, built on the spot: no network, and weights that mean nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from relax_server.models.catalog import resolve_model

LARGE_TEXT = dict(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128
)
"""The shape of Qwen3-0.6B; with its vocabulary 0.6 billion parameters."""
VOCABULARY = 151_936


def text_model(folder: Path, small: bool) -> Path:
    """A Qwen3 with the byte tokenizer; the large one has 151,936 tokens, of which only the first have a text."""
    if small:
        return resolve_model("relax/tiny-qwen3")
    return _random(
        folder, resolve_model("relax/tiny-qwen3"), LARGE_TEXT | dict(vocab_size=VOCABULARY, tie_word_embeddings=True)
    )


def omni_model(folder: Path, small: bool) -> Path:
    """A Qwen3-Omni-MoE thinker with its vision and audio towers; the large one has about 0.5 billion parameters."""
    source = resolve_model("relax/tiny-omni")
    if small:
        return source
    text = dict(
        hidden_size=1024,
        moe_intermediate_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
    )
    change = dict(
        text_config=text,
        vision_config=dict(
            depth=12,
            hidden_size=768,
            intermediate_size=3072,
            num_heads=12,
            out_hidden_size=1024,
            deepstack_visual_indexes=[2, 5, 8],
        ),
        audio_config=dict(
            encoder_layers=6,
            encoder_attention_heads=8,
            encoder_ffn_dim=2048,
            d_model=512,
            output_dim=1024,
            downsample_hidden_size=480,
        ),
    )
    return _random(folder, source, change)


def _random(folder: Path, source: Path, change: dict[str, Any]) -> Path:
    """A folder like another one, whose configuration is changed and whose weights are drawn anew, in bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3OmniMoeThinkerForConditionalGeneration

    shutil.copytree(source, folder, dirs_exist_ok=True)
    for weights in folder.glob("*.safetensors*"):
        weights.unlink()
    settings = json.loads((folder / "config.json").read_text())
    for name, value in change.items():
        settings[name] = settings[name] | value if isinstance(value, dict) else value
    for part in (settings, settings.get("text_config", {})):
        part.pop("layer_types", None)  # of the layers that there were
    rope = settings.get("text_config", {}).get("rope_parameters")
    if rope is not None:
        half = settings["text_config"]["head_dim"] // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    settings["torch_dtype"] = settings["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        if "text_config" in change:
            model: Any = Qwen3OmniMoeThinkerForConditionalGeneration(config)  # type: ignore[arg-type]
        else:
            model = AutoModelForCausalLM.from_config(config)
    model.bfloat16().save_pretrained(folder)
    return folder

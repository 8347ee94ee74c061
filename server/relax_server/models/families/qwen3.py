"""Qwen3: queries and keys are normalised per head."""

from relax_server.models.families.base import Family
from relax_server.models.families.tiny import text_config

QWEN3 = Family(
    name="Qwen3",
    models="Qwen3",
    model_type="qwen3",
    cls="Qwen3ForCausalLM",
    tiny="relax/tiny-qwen3",
    tiny_config=text_config,
    qk_norm=True,
    sglang="tested",
    vllm="tested",
)

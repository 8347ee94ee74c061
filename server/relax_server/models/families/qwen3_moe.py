"""Qwen3-MoE: Qwen3 with a mixture of experts in its layers."""

from relax_server.models.families.base import Family
from relax_server.models.families.tiny import EXPERTS, text_config

QWEN3_MOE = Family(
    name="Qwen3-MoE",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B",
    model_type="qwen3_moe",
    cls="Qwen3MoeForCausalLM",
    tiny="relax/tiny-qwen3-moe",
    tiny_config=lambda ids, vocabulary: text_config(ids, vocabulary) | EXPERTS,
    qk_norm=True,
    sglang="tested",
    vllm="untested",
)

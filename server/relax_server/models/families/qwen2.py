"""Qwen2 and Qwen2.5: biases at queries, keys and values."""

from relax_server.models.families.base import Family
from relax_server.models.families.tiny import text_config

QWEN2 = Family(
    name="Qwen2",
    models="Qwen2, Qwen2.5",
    model_type="qwen2",
    cls="Qwen2ForCausalLM",
    tiny="relax/tiny-qwen2",
    tiny_config=text_config,
    qkv_bias=True,
    sglang="tested",
    vllm="untested",
)

"""Llama, of any version that has neither vision nor experts."""

from relax_server.models.families.base import Family
from relax_server.models.families.tiny import text_config

LLAMA = Family(
    name="Llama",
    models="Llama 2 and 3, SmolLM2",
    model_type="llama",
    cls="LlamaForCausalLM",
    tiny="relax/tiny-llama",
    tiny_config=text_config,
    sglang="tested",
    vllm="untested",
)

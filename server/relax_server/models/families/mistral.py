"""Mistral, of the versions without sliding-window attention; `check_supported` refuses the others."""

from relax_server.models.families.base import Family
from relax_server.models.families.tiny import text_config

MISTRAL = Family(
    name="Mistral",
    models="Mistral 7B from version 0.2 on",
    model_type="mistral",
    cls="MistralForCausalLM",
    tiny="relax/tiny-mistral",
    tiny_config=lambda ids, vocabulary: text_config(ids, vocabulary) | {"sliding_window": None},
    sglang="tested",
    vllm="untested",
)

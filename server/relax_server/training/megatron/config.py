"""Hugging Face configurations as Megatron configurations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from relax_sdk.errors import ConfigError

TEXT_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
OMNI_TYPE = "qwen3_omni_moe_thinker"


def text_config(hf_config: Any) -> Any:
    """The language model's part of a configuration.

    Raises:
        ConfigError: a model type that cannot be trained.
    """
    if hf_config.model_type == OMNI_TYPE:
        return hf_config.text_config
    if hf_config.model_type in TEXT_TYPES:
        return hf_config
    raise ConfigError(f"model_type {hf_config.model_type!r} cannot be trained; allowed: {', '.join((*TEXT_TYPES, OMNI_TYPE))}")


def head_dim(config: Any) -> int:
    """Channels of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def moe_layers(config: Any) -> list[bool]:
    """Say of each decoder layer whether it is a mixture of experts."""
    experts = getattr(config, "num_experts", None) or 0
    dense = getattr(config, "mlp_only_layers", None) or []
    every = getattr(config, "decoder_sparse_step", 1)
    return [experts > 0 and i not in dense and (i + 1) % every == 0 for i in range(config.num_hidden_layers)]


def has_qk_norm(config: Any) -> bool:
    """Whether queries and keys are normalised per head."""
    return config.model_type.startswith("qwen3")


def _check(config: Any) -> None:
    """Refuse what the layers below would silently compute otherwise."""
    for field, wanted in (("hidden_act", ("silu",)), ("attention_bias", (False, None)), ("mlp_bias", (False, None))):
        value = getattr(config, field, None)
        if value not in wanted and not (field == "hidden_act" and value is None):
            raise ConfigError(f"{config.model_type}: {field} = {value!r} cannot be trained; allowed: {wanted[0]!r}")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (getattr(config, "use_sliding_window", False) and config.sliding_window):
        raise ConfigError(f"{config.model_type}: sliding-window attention cannot be trained (layer_types {sorted(kinds)})")


def _moe_settings(config: Any, sparse: list[bool]) -> dict[str, Any]:
    return dict(
        num_moe_experts=config.num_experts,
        moe_router_topk=config.num_experts_per_tok,
        moe_ffn_hidden_size=config.moe_intermediate_size,
        moe_router_pre_softmax=not config.norm_topk_prob,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_layer_freq=[int(s) for s in sparse],
    )


def transformer_config(hf_config: Any, *, dtype: torch.dtype, recompute: bool) -> Any:
    """Megatron's `TransformerConfig` of a Hugging Face configuration.

    Args:
        hf_config: a Hugging Face configuration whose type is in `TEXT_TYPES` or is `OMNI_TYPE`.
        dtype: the type of the parameters, float32 or bfloat16.
        recompute: keep only the inputs of the layers and compute them again for the backward pass.

    Raises:
        ConfigError: the model has a feature that is not supported here.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    c = text_config(hf_config)
    _check(c)
    sparse = moe_layers(c)
    settings: dict[str, Any] = dict(
        num_layers=c.num_hidden_layers,
        hidden_size=c.hidden_size,
        num_attention_heads=c.num_attention_heads,
        num_query_groups=c.num_key_value_heads,
        kv_channels=head_dim(c),
        ffn_hidden_size=c.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=c.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=c.model_type == "qwen2",
        qk_layernorm=has_qk_norm(c),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        mrope_section=[head_dim(c) // 2, 0, 0],
    )
    if any(sparse):
        settings |= _moe_settings(c, sparse)
    if recompute:
        settings |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return TransformerConfig(**settings)

"""Hugging Face configurations as Megatron configurations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from relax_server.models.families import check_supported, family_of


def text_config(hf_config: Any) -> Any:
    """The language model's part of a configuration.

    Raises:
        ConfigError: a model type that is not in the table of families.
    """
    return family_of(hf_config.model_type).text(hf_config)


def head_dim(config: Any) -> int:
    """Channels of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def moe_layers(config: Any) -> list[bool]:
    """Say of each decoder layer whether it is a mixture of experts."""
    experts = getattr(config, "num_experts", None) or 0
    dense = getattr(config, "mlp_only_layers", None) or []
    every = getattr(config, "decoder_sparse_step", 1)
    return [experts > 0 and i not in dense and (i + 1) % every == 0 for i in range(config.num_hidden_layers)]


def _moe_settings(config: Any, sparse: list[bool]) -> dict[str, Any]:
    return dict(
        num_moe_experts=config.num_experts,
        moe_router_topk=config.num_experts_per_tok,
        moe_ffn_hidden_size=config.moe_intermediate_size,
        moe_router_pre_softmax=not getattr(config, "norm_topk_prob", True),
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_layer_freq=[int(s) for s in sparse],
    )


def transformer_config(hf_config: Any, *, dtype: torch.dtype, recompute: bool) -> Any:
    """Megatron's `TransformerConfig` of a Hugging Face configuration.

    Args:
        hf_config: a Hugging Face configuration of a family of `models.families.TABLE`.
        dtype: the type of the parameters, float32 or bfloat16.
        recompute: keep only the inputs of the layers and compute them again for the backward pass.

    Raises:
        ConfigError: the model has a feature that is not supported here.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    family = family_of(hf_config.model_type)
    c = family.text(hf_config)
    check_supported(c, hf_config.model_type)
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
        add_qkv_bias=family.qkv_bias,
        qk_layernorm=family.qk_norm,
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

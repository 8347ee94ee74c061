"""Hugging Face configurations as Megatron configurations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from relax_sdk.layout import LayoutConfig
from relax_sdk.training_config import Recompute
from relax_server.models.division import check_layout, moe_layers, stages
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


def _layout_settings(c: Any, layout: LayoutConfig) -> dict[str, Any]:
    """Megatron's settings of a layout."""
    settings: dict[str, Any] = dict(
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    if layout.pp > 1:
        settings |= dict(variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")  # its default is refused beside that
        own = stages(c.num_hidden_layers, layout.pp)
        if len(own[0]) != len(own[-1]) or c.num_hidden_layers % layout.pp:
            settings |= dict(num_layers_in_first_pipeline_stage=len(own[0]), num_layers_in_last_pipeline_stage=len(own[-1]))
    if layout.vpp > 1:  # without the overlap two stages mix up what they send each other in both directions, in silence
        settings |= dict(virtual_pipeline_model_parallel_size=layout.vpp, overlap_p2p_comm=True, batch_p2p_comm=False)
    return settings


def transformer_config(hf_config: Any, *, dtype: torch.dtype, recompute: Recompute, layout: LayoutConfig | None = None) -> Any:
    """Megatron's `TransformerConfig` of a Hugging Face configuration.

    Args:
        hf_config: a Hugging Face configuration of a family of `models.families.TABLE`.
        dtype: the type of the parameters, float32 or bfloat16.
        recompute: what is computed again for the backward pass: whole layers (True), or attention alone (`selective`).
        layout: how the ranks share the model; None: there is one.

    Raises:
        ConfigError: the model has a feature that is not supported here, or it cannot be divided in this layout.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    family = family_of(hf_config.model_type)
    c = family.text(hf_config)
    layout = layout if layout is not None else LayoutConfig()
    check_supported(c, hf_config.model_type)
    check_layout(c, layout)
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
        perform_initialization=False,  # a folder fills it
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        mrope_section=[head_dim(c) // 2, 0, 0],
    )
    settings |= _layout_settings(c, layout)
    if any(sparse):
        settings |= _moe_settings(c, sparse)
    if recompute == "selective":
        settings |= dict(recompute_granularity="selective", recompute_modules=["core_attn"])
    elif recompute:
        settings |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return TransformerConfig(**settings)

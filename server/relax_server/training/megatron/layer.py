"""One decoder layer over a packed forest, and the specification that Megatron builds a decoder from."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from relax_server.training.megatron.attention import ForestAttention
from relax_server.training.megatron.experts import RankExperts
from relax_server.training.megatron.micro_batch import MicroBatch
from relax_server.training.megatron.router import ReplayRouter


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight says whether its gradient is summed over the sequence-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ForestLayer(TransformerLayer):
    """Megatron's layer, with what the micro-batch brings for it: routes to its experts, and features of DeepStack."""

    def forward(self, *args: Any, packed_seq_params: MicroBatch, **kwargs: Any) -> tuple[Tensor, Any]:
        """Compute the layer; called in forward and once more where it is recomputed in backward.

        Args:
            args: as Megatron's layer takes them.
            packed_seq_params: the micro-batch.
            kwargs: as Megatron's layer takes them.

        Returns:
            Hidden states [t, 1, hidden], and Megatron's context (None).
        """
        number, micro, mlp = self.layer_number - 1, packed_seq_params, self.mlp
        router: Any = mlp.router if isinstance(mlp, MoELayer) else None
        with contextlib.nullcontext() if router is None else router.replaying(micro.routes.get(number)):
            out: Any = super().forward(*args, packed_seq_params=micro, **kwargs)
        hidden, context = out
        if number in micro.deep:
            hidden = hidden.index_add(0, micro.deep_tokens, micro.deep[number])
        return hidden, context


def layer_spec(num_experts: int | None, qk_layernorm: bool) -> ModuleSpec:
    """One decoder layer: Megatron's local layer with forest attention, replayed routes and the RMSNorm above."""
    spec = get_gpt_layer_local_spec(num_experts=num_experts, qk_layernorm=qk_layernorm, normalization="RMSNorm")
    spec.module = ForestLayer
    layer: Any = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if num_experts:
        layer.mlp.submodules.router = ReplayRouter
        layer.mlp.submodules.experts.module = RankExperts
    attention = layer.self_attention.submodules
    attention.core_attention = ForestAttention
    if qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def block_spec(moe_layers: Sequence[bool], num_experts: int | None, qk_layernorm: bool) -> TransformerBlockSubmodules:
    """The decoder layers of a stage; `moe_layers` says which of them are mixtures of experts."""
    dense = layer_spec(None, qk_layernorm)
    moe = layer_spec(num_experts, qk_layernorm) if any(moe_layers) else dense
    norm: Any = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[moe if sparse else dense for sparse in moe_layers], layer_norm=norm)

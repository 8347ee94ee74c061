"""The experts of a mixture: one after the other, or all in one grouped matrix product.

With many experts each has few tokens, and a GPU waits longer for the start of a kernel than for its work. torch's `grouped_mm`
multiplies all of them in one. The parameters stay where Megatron's `SequentialMLP` has them, one matrix an expert, so names,
checkpoints, adapters and links to Hugging Face weights are the same; a stacked copy lives for the product alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from relax_sdk.errors import ConfigError
from relax_sdk.training_config import Experts

ALIGNED = 8
"""Numbers that rows of its matrices must be a multiple of, for bfloat16 on a GPU."""
LEAST_CAPABILITY = (8, 0)


def way(setting: Experts, device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> Literal["sequential", "grouped"]:
    """Choose how experts are computed.

    Args:
        setting: `TrainingConfig.experts`.
        device: where the model is trained.
        dtype: of its weights.
        widths: inputs and outputs of this rank's experts.

    Raises:
        ConfigError: grouped products are asked for and this GPU does not do them.
    """
    if setting == "sequential":
        return setting
    lacking = _lacking(device, dtype, widths)
    if setting == "grouped":
        if lacking and device.type == "cuda":
            raise ConfigError(f"training.experts = 'grouped' needs {lacking}; set it to 'auto' or 'sequential'")
        return setting
    return "sequential" if lacking else "grouped"


def _lacking(device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> str:
    """What grouped products need and do not have here; empty: nothing."""
    if device.type != "cuda":
        return "an NVIDIA GPU to be faster"
    if dtype != torch.bfloat16:
        return "training.dtype = 'bfloat16'"
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return "a GPU of compute capability 8.0 or above"
    if any(width % ALIGNED for width in widths):
        return f"experts whose widths are multiples of {ALIGNED}, and here they are {list(widths)}"
    return ""


class _GroupedProduct(torch.autograd.Function):
    """`x @ w[g].t()` for the rows of each group g; stacked weights are not kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        return F.grouped_mm(x, torch.stack(weights).mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override] - torch says only Any
        x, ends, *weights = ctx.saved_tensors
        slope = slope.contiguous()
        of_x = F.grouped_mm(slope, torch.stack(weights), offs=ends) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return of_x, None, *[None] * len(weights)
        of_weights = F.grouped_mm(slope.t(), x.contiguous(), offs=ends)
        empty = ends == F.pad(ends, (1, 0))[:-1]  # what a kernel writes for a group without rows is not relied on
        of_weights.masked_fill_(empty[:, None, None], 0.0)
        return of_x, None, *of_weights.unbind()


def grouped_product(x: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Multiply the rows of each group with its own matrix.

    Args:
        x: [n, inputs], the rows of one group after those of the other.
        ends: int32 [groups], the first row after each group.
        weights: [outputs, inputs] of each group.

    Returns:
        [n, outputs].
    """
    return _GroupedProduct.apply(x, ends, *weights)


class RankExperts(SequentialMLP):
    """Megatron's experts of this rank."""

    grouped = False
    """All in one product; set once the model is built."""

    def forward(self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor) -> Any:
        """Compute the experts.

        Args:
            permuted_local_hidden_states: [n, hidden], the tokens of one expert after those of the other.
            tokens_per_expert: int [experts].
            permuted_probs: [n], what the outputs are weighed with.

        Returns:
            [n, hidden], and no bias.
        """
        x, probs = permuted_local_hidden_states, permuted_probs
        experts: list[Any] = list(self.local_experts)
        if not (self.grouped and len(experts) > 1 and len(x) and _can_be_grouped(experts)):
            return super().forward(x, tokens_per_expert, probs)
        ends = tokens_per_expert.to(x.device).cumsum(0).to(torch.int32)
        gate, up = _linear(x, ends, [expert.linear_fc1 for expert in experts]).chunk(2, -1)
        inner = self.config.activation_func(gate) * up
        inner = (inner * probs.unsqueeze(-1)).to(inner.dtype)
        return _linear(inner, ends, [expert.linear_fc2 for expert in experts]), None


def _linear(x: Tensor, ends: Tensor, layers: Sequence[Any]) -> Tensor:
    out = grouped_product(x, ends, [layer.weight for layer in layers])
    adapters = [layer.adapter for layer in layers if hasattr(layer, "adapter")]
    if not adapters or not adapters[0].on:
        return out
    a, b = zip(*(adapter.matrices() for adapter in adapters), strict=True)
    return out + adapters[0].scale * grouped_product(grouped_product(x, ends, a), ends, b)


def _can_be_grouped(experts: Sequence[Any]) -> bool:
    """Adapters are grouped where they are whole, and wide enough for the kernel."""
    adapters = [layer.adapter for layer in (experts[0].linear_fc1, experts[0].linear_fc2) if hasattr(layer, "adapter")]
    if not adapters:
        return True
    whole = experts[0].linear_fc1.tp_group.size() == 1
    return whole and all(adapter.rank % ALIGNED == 0 for adapter in adapters)

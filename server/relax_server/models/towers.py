"""Media towers whose layers are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def recompute_layers(tower: Any) -> None:
    """Have a tower keep the inputs of its layers alone, and compute a layer again in the backward pass.

    Args:
        tower: as `Tower.build` makes it.
    """
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_layers import GradientCheckpointingLayer

    def compute(forward: Callable[..., Any], *inputs: Any) -> Any:
        if not any(parameter.requires_grad for parameter in tower.parameters()):
            return forward(*inputs)  # `checkpoint` would keep the inputs also where there is no backward pass
        return checkpoint(forward, *inputs, use_reentrant=False)

    for layer in tower.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = compute  # type: ignore[assignment] - such a layer calls it

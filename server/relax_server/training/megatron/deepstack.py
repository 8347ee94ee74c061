"""DeepStack features of the vision tower where layers are computed again in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Leaves:
    """Copies of the DeepStack features on which recomputed layers leave their gradients."""

    def __init__(self, features: list[Tensor]) -> None:
        self.tensors = [f.detach().requires_grad_() for f in features]


class _HandBack(torch.autograd.Function):
    """The hidden states unchanged; in backward, which runs after every layer's, the leaves' gradients go to the tower.

    Recomputed layers run a backward pass of their own each. Were they to reach the vision tower directly, its graph would
    be walked once per layer, which autograd refuses.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, leaves: _Leaves, *features: Tensor) -> Tensor:
        ctx.leaves = leaves
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (gradient, None, *(leaf.grad for leaf in ctx.leaves.tensors))


def leave_gradients(hidden: Tensor, features: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Cut features off from their graph for the layers that add them.

    Args:
        hidden: [t, 1, width], what the first of these layers takes.
        features: [n, 1, width] for each layer.

    Returns:
        The hidden states, whose backward pass hands the features' gradients on; and the features for the layers.
    """
    leaves = _Leaves(features)
    return _HandBack.apply(hidden, leaves, *features), leaves.tensors  # type: ignore[return-value]

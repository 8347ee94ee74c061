"""From logits to the distribution that tokens are sampled from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = -1e30
"""The logit of a banned token: its probability is exactly 0, and 0 times it is still a number."""


@dataclass(frozen=True)
class Distribution:
    """Of r positions over v tokens."""

    logprobs: Tensor
    """float32 [r, v]."""

    @property
    def entropy(self) -> Tensor:
        """H = -sum over tokens of p log p, in nats, [r]."""
        return -(self.logprobs.exp() * self.logprobs).sum(-1)

    def of(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """log p of tokens: int64 [n], int64 [n] -> [n]."""
        return self.logprobs[rows, tokens]


def distribution(logits: Tensor, banned: Tensor, temperature: float = 1.0) -> Distribution:
    """log softmax(logits / temperature), without the banned tokens.

    Args:
        logits: [r, v].
        banned: int64 [b], tokens that are never sampled.
        temperature: above 0.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    if len(banned):
        logits = logits.index_fill(1, banned, NEVER)
    return Distribution(torch.log_softmax(logits, -1))

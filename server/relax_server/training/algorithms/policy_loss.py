"""The clipped surrogate objective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from relax_sdk.config import AlgorithmConfig
from relax_server.training.algorithms.registry import register

LOG_RATIO = 20.0
"""Beyond this a ratio says only that old logprobs and tokens do not belong together; its exponential must not overflow."""


@dataclass(frozen=True)
class PolicyLoss:
    """Per token, all [n]."""

    loss: Tensor
    ratio: Tensor
    """Detached."""
    clipped: Tensor
    """bool: where clipping stopped the gradient."""


@register("policy_loss", "clip")
def clipped_policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: AlgorithmConfig) -> PolicyLoss:
    """L = -S where A >= 0, else -max(S, dual_clip A), with S = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    r = exp(logprobs - old_logprobs), between e^-20 and e^20. PPO: Schulman et al., arXiv 1707.06347, equation 7. A larger
    `clip_high` than `clip_low` ("clip-higher") leaves unlikely tokens room to grow: Yu et al., "DAPO", arXiv 2503.14476,
    section 3.1. The outer maximum ("dual clip") bounds the loss where the advantage is negative, which PPO leaves growing
    with r: Ye et al., "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning", arXiv 1912.09729,
    equation 6. The gradient of a token's loss by its logprob is so at most max(1 + clip_high, dual_clip) |A|.

    Args:
        logprobs: of the current policy, with gradient, [n].
        old_logprobs: of the policy that the ratio is taken against, [n].
        advantages: [n].
        config: `clip_low`, `clip_high`, `dual_clip`.

    Returns:
        One loss per token; averaging is the caller's (see `aggregation`).
    """
    ratio = torch.exp((logprobs - old_logprobs).clamp(-LOG_RATIO, LOG_RATIO))
    free = ratio * advantages
    bound = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    surrogate, least = torch.minimum(free, bound), config.dual_clip * advantages
    beyond = (advantages < 0) & (surrogate < least)
    return PolicyLoss(-torch.where(beyond, least, surrogate), ratio.detach(), ((bound < free) | beyond).detach())

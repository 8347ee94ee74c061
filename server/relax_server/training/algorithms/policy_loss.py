"""The clipped surrogate objective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO = 20.0
"""Beyond this a ratio says only that old logprobs and tokens do not belong together; one such token must not make the loss
infinite."""


@dataclass(frozen=True)
class PolicyLoss:
    """Per token, all [n]."""

    loss: Tensor
    ratio: Tensor
    """Detached."""
    clipped: Tensor
    """bool: where clipping stopped the gradient."""


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r = exp(logprobs - old_logprobs) between e^-20 and e^20.

    PPO: Schulman et al., arXiv 1707.06347, equation 7. A larger `clip_high` than `clip_low` ("clip-higher") leaves unlikely
    tokens room to grow: Yu et al., "DAPO", arXiv 2503.14476, section 3.1.

    Args:
        logprobs: of the current policy, with gradient, [n].
        old_logprobs: of the policy that the ratio is taken against, [n].
        advantages: [n].
        clip_low: below 1.
        clip_high: above 0.

    Returns:
        One loss per token; averaging is the caller's, over all tokens of the global batch (DAPO, section 3.3).
    """
    ratio = torch.exp((logprobs - old_logprobs).clamp(-LOG_RATIO, LOG_RATIO))
    free = ratio * advantages
    bound = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return PolicyLoss(-torch.minimum(free, bound), ratio.detach(), (bound < free).detach())

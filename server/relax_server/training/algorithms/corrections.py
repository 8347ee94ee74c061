"""Corrections for data that another policy, or another program, has sampled."""

from __future__ import annotations

import torch
from torch import Tensor


def truncated_importance_weights(trainer_logprobs: Tensor, engine_logprobs: Tensor, clip: float) -> Tensor:
    """w = min(exp(trainer_logprobs - engine_logprobs), clip).

    Corrects for the engine computing other probabilities than the trainer for the same weights: Yao et al., "Your Efficient
    RL Framework Secretly Brings You Off-Policy RL Training" (fengyao.notion.site/off-policy-rl, 2025), truncated as in
    Ionides, "Truncated Importance Sampling" (2008).

    Args:
        trainer_logprobs: computed by the trainer before the update, [n].
        engine_logprobs: as sampled, [n].
        clip: the largest weight; 0 turns the correction off.

    Returns:
        Weights [n], without gradient; ones where it is off.
    """
    if clip == 0:
        return torch.ones_like(trainer_logprobs)
    return torch.exp(trainer_logprobs - engine_logprobs).clamp(max=clip).detach()

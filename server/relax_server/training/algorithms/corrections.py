"""Corrections for data that another policy, or another program, has sampled, and the policy that ratios are taken against."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from relax_sdk.config import AlgorithmConfig
from relax_server.training.algorithms.policy_loss import LOG_RATIO
from relax_server.training.algorithms.registry import register

Proximal = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(current logprobs, behavior logprobs, logprobs before the first update or None for the current ones) -> [n]."""


def behavior(logprobs: Tensor, engine: Tensor, recomputed: Tensor | None) -> Tensor:
    """The policy that sampled, as the engine reported it: ratios see staleness and the engine's rounding as well."""
    return engine


def before_update(logprobs: Tensor, engine: Tensor, recomputed: Tensor | None) -> Tensor:
    """The trainer's policy before the first update on the batch: the proximal policy of decoupled PPO.

    Hilton et al., "Batch size-invariance for policy optimization", arXiv 2110.00641, section 3: the ratio bounds how far an
    update goes, and a separate weight corrects for the policy that sampled. In the first update both are the same policy,
    so the ratio is 1 and only the correction acts.
    """
    return logprobs.detach() if recomputed is None else recomputed


PROXIMAL: dict[str, Proximal] = {"engine": behavior, "recompute": before_update}
"""What `AlgorithmConfig.old_logprobs` names."""


@register("correction", "tis")
def truncated_importance_weights(proximal: Tensor, behavior: Tensor, config: AlgorithmConfig) -> Tensor:
    """w = min(exp(proximal - behavior), tis_clip): truncated importance sampling.

    Ionides, "Truncated Importance Sampling" (2008). It corrects for stale weights (arXiv 2110.00641), and for the engine
    computing other probabilities than the trainer for the same weights: Yao et al., "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training" (fengyao.notion.site/off-policy-rl, 2025).

    Args:
        proximal: logprobs of the policy that the loss is about, [n].
        behavior: logprobs as sampled, [n].
        config: `tis_clip`.

    Returns:
        Weights [n], without gradient; exactly 1 where both are equal.
    """
    return torch.exp((proximal - behavior).clamp(max=LOG_RATIO)).clamp(max=config.tis_clip).detach()


@register("correction", "none")
def no_correction(proximal: Tensor, behavior: Tensor, config: AlgorithmConfig) -> Tensor:
    """w = 1, for data that the policy itself has just sampled. [n] -> [n]."""
    return torch.ones_like(behavior)

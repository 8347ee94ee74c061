"""Estimates of KL(policy || reference) from tokens sampled by the policy.

J. Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html, 2020). With d = logprobs - reference_logprobs:
k1 = d, k2 = d² / 2, k3 = exp(-d) - 1 + d. k1 and k3 are unbiased; k3 is never negative.
"""

from __future__ import annotations

import torch
from torch import Tensor


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d; unbiased, of high variance, negative for some tokens. [n] -> [n]."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d² / 2; biased, of low variance; its gradient is that of the KL divergence on policy. [n] -> [n]."""
    return (logprobs - reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(-d) - 1 + d; unbiased, of low variance, never negative; the estimate of GRPO (arXiv 2402.03300). [n] -> [n].

    d is taken as at least -20, so that one impossible token does not make the sum infinite.
    """
    d = (logprobs - reference).clamp(min=-20.0)
    return torch.expm1(-d) + d

"""Estimates of KL(policy || reference) from tokens sampled by the policy.

J. Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html, 2020). With d = logprobs - reference_logprobs:
k1 = d, k2 = d² / 2, k3 = exp(-d) - 1 + d. As estimates of the divergence k1 and k3 are unbiased, and k3 is never negative. As
terms of a loss they are judged by their gradients on tokens that the policy sampled: that of k2 is the gradient of
KL(policy || reference); that of k3 is the gradient of KL(reference || policy), whose single terms are as large as the ratio of
the reference's probability to the policy's; that of k1 is zero in the mean (Liu et al., "Rethinking KL Regularization in RLHF",
arXiv 2510.01555).
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


KL = {"k2": k2, "k3": k3}
"""What `AlgorithmConfig.kl_estimator` names."""

"""Estimates of KL(policy || reference) from tokens sampled by the policy, and the terms of a loss that are made of them.

J. Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html, 2020). With d = logprobs - reference_logprobs:
k1 = d, k2 = d² / 2, k3 = exp(-d) - 1 + d. As estimates of the divergence k1 and k3 are unbiased, and k3 is never negative. As
terms of a loss they are judged by their gradients on tokens that the policy sampled: that of k2 is the gradient of
KL(policy || reference); that of k3 is the gradient of KL(reference || policy), whose single terms are as large as the ratio of
the reference's probability to the policy's; that of k1 is zero in the mean (Liu et al., "Rethinking KL Regularization in RLHF",
arXiv 2510.01555).

All of it holds for tokens that the *current* policy sampled. The objective therefore weighs each token by the importance ratio
of the current policy to the one that sampled it, without gradient: E_behavior[(policy / behavior) grad k] = E_policy[grad k].
That ratio is truncated at `tis_clip`, and the gradient of a term by a token's logprob at `LARGEST_K2` or `LARGEST_K3`; where
neither bound is reached, the statements above hold on stale data too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from relax_server.training.algorithms.registry import register

LARGEST_K2 = 10.0
"""The largest gradient of a k2 term by a token's logprob, in nats: the distance itself."""

LARGEST_K3 = 100.0
"""The largest gradient of a k3 term by a token's logprob, reference / policy - 1.

An answer that the policy has nearly given up stays possible by this ratio, on the rare token that begins it. With a bound b the
penalty weakens once the answer is more than b times rarer than in the reference, and kl_coef x b must outweigh the advantage of
other answers: 0.03 x 100 does, in groups of 8, whose largest advantage is 2.65. 0.03 x 10 does not.
"""


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d; unbiased, of high variance, negative for some tokens. [n] -> [n]."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d² / 2; biased, of low variance. [n] -> [n]."""
    return (logprobs - reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(-d) - 1 + d; unbiased, of low variance, never negative; the estimate of GRPO (arXiv 2402.03300). [n] -> [n].

    d is taken as at least -20, so that one impossible token does not make the sum infinite.
    """
    d = (logprobs - reference).clamp(min=-20.0)
    return torch.expm1(-d) + d


@register("kl_estimator", "k2")
def k2_loss(logprobs: Tensor, reference: Tensor) -> Tensor:
    """`k2` where |d| <= 10, and its tangent beyond: the gradient is d, between -10 and 10. [n] -> [n]."""
    d = logprobs - reference
    near = d.clamp(-LARGEST_K2, LARGEST_K2)
    return _tangent(d, near, near.square() / 2, near)


@register("kl_estimator", "k3")
def k3_loss(logprobs: Tensor, reference: Tensor) -> Tensor:
    """`k3` where exp(-d) <= 101, and its tangent beyond: the gradient is 1 - min(exp(-d), 101). [n] -> [n]."""
    d = logprobs - reference
    near = d.clamp(min=-math.log1p(LARGEST_K3))
    return _tangent(d, near, torch.expm1(-near) + near, -torch.expm1(-near))


def _tangent(d: Tensor, near: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """A function's value at `near`, which is `d` or the border, and from there on its tangent; [n]."""
    return value + slope.detach() * (d - near)

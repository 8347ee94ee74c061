"""Reinforcement-learning algorithms as pure functions of tensors; each states its formula and where it comes from."""

from relax_server.training.algorithms.advantages import ADVANTAGES, dr_grpo, grpo, rloo, turn_advantages, turn_returns
from relax_server.training.algorithms.corrections import truncated_importance_weights
from relax_server.training.algorithms.distribution import Distribution, distribution
from relax_server.training.algorithms.kl import KL, k1, k2, k3
from relax_server.training.algorithms.policy_loss import PolicyLoss, clipped_policy_loss

__all__ = [
    "ADVANTAGES",
    "KL",
    "Distribution",
    "PolicyLoss",
    "clipped_policy_loss",
    "distribution",
    "dr_grpo",
    "grpo",
    "k1",
    "k2",
    "k3",
    "rloo",
    "truncated_importance_weights",
    "turn_advantages",
    "turn_returns",
]

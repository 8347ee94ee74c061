"""Reinforcement-learning algorithms as pure functions of tensors; each states its formula and where it comes from."""

from relax_server.training.algorithms.advantages import dr_grpo, grpo, rloo, turn_advantages, turn_returns
from relax_server.training.algorithms.aggregation import sample_mean, token_mean
from relax_server.training.algorithms.corrections import PROXIMAL, no_correction, truncated_importance_weights
from relax_server.training.algorithms.distribution import Distribution, distribution
from relax_server.training.algorithms.kl import k1, k2, k2_loss, k3, k3_loss
from relax_server.training.algorithms.policy_loss import PolicyLoss, clipped_policy_loss
from relax_server.training.algorithms.registry import KINDS, find, names, register

__all__ = [
    "KINDS",
    "PROXIMAL",
    "Distribution",
    "PolicyLoss",
    "clipped_policy_loss",
    "distribution",
    "dr_grpo",
    "find",
    "grpo",
    "k1",
    "k2",
    "k2_loss",
    "k3",
    "k3_loss",
    "names",
    "no_correction",
    "register",
    "rloo",
    "sample_mean",
    "token_mean",
    "truncated_importance_weights",
    "turn_advantages",
    "turn_returns",
]

"""Group-relative advantages: how much better an episode, or what follows a turn, was than the others of its task."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from relax_server.training.algorithms.registry import register

EPSILON = 1e-6

Advantage = Callable[[Tensor], Tensor]
"""Rewards of one group, float64 [n], to advantages [n]."""


def _same(rewards: Tensor) -> bool:
    return bool(len(rewards) < 2 or (rewards == rewards[0]).all())


@register("advantage", "grpo")
def grpo(rewards: Tensor) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6), with the sample standard deviation (n - 1).

    Group Relative Policy Optimization: Shao et al., "DeepSeekMath", arXiv 2402.03300, section 4.1.2.

    Args:
        rewards: float64 [n], of all episodes of one group.

    Returns:
        float64 [n]; zero where all rewards are equal, or where the group has one member.
    """
    if _same(rewards):
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + EPSILON)


@register("advantage", "dr_grpo")
def dr_grpo(rewards: Tensor) -> Tensor:
    """A_i = r_i - mean(r).

    Without the division by the standard deviation, which weighs groups of nearly equal rewards most: Liu et al.,
    "Understanding R1-Zero-Like Training", arXiv 2503.20783, section 3.2.

    Args:
        rewards: float64 [n].

    Returns:
        float64 [n]; zero where all rewards are equal.
    """
    if _same(rewards):
        return torch.zeros_like(rewards)
    return rewards - rewards.mean()


@register("advantage", "rloo")
def rloo(rewards: Tensor) -> Tensor:
    """A_i = r_i - mean of r_j over j != i, which is n / (n - 1) * (r_i - mean(r)).

    REINFORCE with a leave-one-out baseline: Ahmadian et al., "Back to Basics", arXiv 2402.14740, section 4.

    Args:
        rewards: float64 [n].

    Returns:
        float64 [n]; zero where all rewards are equal, or where the group has one member.
    """
    if _same(rewards):
        return torch.zeros_like(rewards)
    n = len(rewards)
    return n / (n - 1) * (rewards - rewards.mean())


def turn_returns(turn_rewards: Sequence[float], reward: float, gamma: float = 1.0) -> list[float]:
    """Reward-to-go of every turn: R_t = r_t + gamma R_(t+1).

    Sutton and Barto, "Reinforcement Learning", 2nd edition, equation 3.9, with turns as time steps. What scoring adds to the
    whole episode counts as earned at its end, in its last turn.

    Args:
        turn_rewards: of each turn.
        reward: of the whole episode, turn rewards included.
        gamma: discount from one turn to the one before; 0 credits each turn with its own reward alone.

    Returns:
        One number per turn; with gamma = 1 the first is `reward`.
    """
    returns: list[float] = []
    following = 0.0
    earned = [*turn_rewards]
    if earned:
        earned[-1] += reward - sum(turn_rewards)
    for own in reversed(earned):
        following = own + gamma * following
        returns.append(following)
    return returns[::-1]


def turn_advantages(returns: Sequence[Sequence[float]], advantage: Advantage) -> list[list[float]]:
    """Compare the reward-to-go of a turn with that of the same turn in the other episodes of the group.

    A group-relative baseline per step, as the step-level groups of Feng et al., "Group-in-Group Policy Optimization",
    arXiv 2505.10978, with the turn's number in place of an equal state.

    Args:
        returns: per episode, per turn; episodes may differ in length.
        advantage: compares the rewards of a group; it sees the episodes that have the turn.

    Returns:
        Like `returns`. A turn that only one episode reached has advantage zero.
    """
    out = [[0.0] * len(episode) for episode in returns]
    for t in range(max(map(len, returns), default=0)):
        members = [i for i, episode in enumerate(returns) if len(episode) > t]
        values = advantage(torch.tensor([returns[i][t] for i in members], dtype=torch.float64))
        for i, value in zip(members, values.tolist(), strict=True):
            out[i][t] = value
    return out

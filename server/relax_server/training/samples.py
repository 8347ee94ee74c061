"""Groups of finished episodes as training samples with an advantage for every turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from relax_sdk.config import AlgorithmConfig
from relax_sdk.trajectory import Group, Sample, Trajectory
from relax_server.training.algorithms import find, turn_advantages, turn_returns
from relax_server.training.batch import Trained


@dataclass(frozen=True)
class StepSamples:
    """The samples of one step, in the order of groups and trajectories."""

    samples: list[Sample]
    trajectories: list[Trajectory]
    """The trajectory that each sample comes from."""
    group: list[int]
    """Index of the group of each sample."""
    advantages: list[list[float]]
    """One list per sample: the advantage of each turn of its trajectory."""
    reward: float
    """Mean over all trajectories that did not fail, those without a sample included."""
    reward_std: float
    """Mean over groups of the standard deviation (n) of their rewards."""
    zero_variance_groups: int
    """Groups whose rewards are all equal, so that they teach nothing."""

    def split(self, n: int) -> list[list[int]]:
        """Indices of the samples in at most `n` parts of whole groups."""
        groups = sorted(set(self.group))
        part_of = {int(g): p for p, part in enumerate(np.array_split(groups, min(n, len(groups)))) for g in part}
        parts: list[list[int]] = [[] for _ in range(min(n, len(groups)))]
        for i, g in enumerate(self.group):
            parts[part_of[g]].append(i)
        return parts


def group_advantages(group: Group, algorithm: AlgorithmConfig) -> list[list[float]]:
    """Compute the advantages of a group's turns.

    All trajectories that did not fail count, also those that have no sample; a failed one has no reward, so it is in no
    baseline.

    Returns:
        One list per trajectory with one number per turn; 0 for those of failed ones.
    """
    counted = group.counted
    values = dict(zip(map(id, counted), _advantages(counted, algorithm), strict=True))
    return [values.get(id(t), [0.0] * len(t.turns)) for t in group.trajectories]


def _advantages(counted: Sequence[Trajectory], algorithm: AlgorithmConfig) -> list[list[float]]:
    """By trajectory and turn."""
    if not counted:
        return []
    advantage = find("advantage", algorithm.advantage)
    if algorithm.credit == "turn":
        returns = [turn_returns([turn.reward for turn in t.turns], t.reward, algorithm.gamma) for t in counted]
        return turn_advantages(returns, advantage)
    rewards = torch.tensor([t.reward for t in counted], dtype=torch.float64)
    return [[a] * len(t.turns) for a, t in zip(advantage(rewards).tolist(), counted, strict=True)]


def collect(
    groups: Sequence[Group], algorithm: AlgorithmConfig, advantages: Sequence[list[list[float]]] | None = None
) -> StepSamples:
    """Samples and advantages of a batch of groups; failed trajectories are left out.

    Args:
        groups: the groups of the batch.
        algorithm: the settings that say how advantages are computed.
        advantages: one item per group, as `group_advantages` returns it, if that is known; None calls it.
    """
    if advantages is None:
        advantages = [group_advantages(group, algorithm) for group in groups]
    out = StepSamples([], [], [], [], 0.0, 0.0, 0)
    rewards: list[float] = []
    spreads: list[float] = []
    for index, group in enumerate(groups):
        own = [t.reward for t in group.counted]
        rewards += own
        spreads.append(float(np.std(own)) if own else 0.0)
        for trajectory, values in zip(group.trajectories, advantages[index], strict=True):
            for sample in trajectory.samples() if trajectory.failure is None else ():
                out.samples.append(sample)
                out.trajectories.append(trajectory)
                out.group.append(index)
                out.advantages.append(values)
    return StepSamples(
        out.samples,
        out.trajectories,
        out.group,
        out.advantages,
        reward=float(np.mean(rewards)) if rewards else 0.0,
        reward_std=float(np.mean(spreads)) if spreads else 0.0,
        zero_variance_groups=sum(len({t.reward for t in g.counted}) <= 1 for g in groups),
    )


def token_advantages(collected: StepSamples, trained: Trained) -> np.ndarray:
    """The advantage of every trained token, float32 [n]."""
    table = np.zeros((len(collected.samples), max(map(len, collected.advantages), default=0)), np.float32)
    for i, advantages in enumerate(collected.advantages):
        table[i, : len(advantages)] = advantages
    return table[trained.sample, trained.turn]

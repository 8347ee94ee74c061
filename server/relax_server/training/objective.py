"""The training objective of one forest: from logits to a sum of token losses and what is reported of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from relax_sdk.config import AlgorithmConfig
from relax_server.training import algorithms
from relax_server.training.forest import Forest

LossSum = tuple[Tensor, int, dict[str, Tensor]]


@dataclass(frozen=True)
class Targets:
    """Per trained token of the batch, in the order of `Batch.trained`, on the device."""

    token: Tensor
    """int64 [n]."""
    engine: Tensor
    """float32 [n], logprobs as sampled."""
    advantage: Tensor
    """float32 [n]."""
    recomputed: Tensor | None = None
    """float32 [n], the trainer's logprobs before the first of several updates; a single one has them from its own forward."""
    reference: Tensor | None = None
    """float32 [n], of the frozen reference."""
    banned: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """int64 [b]."""
    temperature: float = 1.0


def token_logprobs(logits: Tensor, forest: Forest, targets: Targets) -> Tensor:
    """Log probabilities of a forest's trained tokens, [n of the forest]."""
    of = algorithms.distribution(logits, targets.banned, targets.temperature).of
    return of(_to(forest.row, logits), targets.token[_to(forest.entry, logits)])


def cross_entropy(logits: Tensor, forest: Forest, targets: Targets) -> LossSum:
    """-log p summed over the trained tokens."""
    loss = -token_logprobs(logits, forest, targets).sum()
    return loss, len(forest.entry), {"loss": loss.detach().clone()}


def policy_objective(config: AlgorithmConfig) -> Callable[[Tensor, Forest, Targets], LossSum]:
    """The loss of reinforcement learning, summed over the trained tokens of a forest.

    Per token: weight x clipped policy loss - entropy_coef x entropy + kl_coef x k2 or k3, where weight is the truncated
    importance weight if old logprobs are recomputed, else 1.
    """

    def objective(logits: Tensor, forest: Forest, targets: Targets) -> LossSum:
        row, entry = _to(forest.row, logits), _to(forest.entry, logits)
        dist = algorithms.distribution(logits, targets.banned, targets.temperature)
        logprobs = dist.of(row, targets.token[entry])
        engine = targets.engine[entry]
        old, weight = engine, torch.ones_like(engine)
        if config.old_logprobs == "recompute":
            old = logprobs.detach() if targets.recomputed is None else targets.recomputed[entry]
            weight = algorithms.truncated_importance_weights(old, engine, config.tis_clip)
        policy = algorithms.clipped_policy_loss(logprobs, old, targets.advantage[entry], config.clip_low, config.clip_high)
        loss = (weight * policy.loss).sum()
        entropy = dist.entropy if config.entropy_coef else dist.entropy.detach()
        entropy = entropy.index_select(0, row).sum()
        loss = loss - config.entropy_coef * entropy
        kl = logits.new_zeros((), dtype=torch.float32)
        if targets.reference is not None:
            reference = targets.reference[entry]
            loss = loss + config.kl_coef * algorithms.KL[config.kl_estimator](logprobs, reference).sum()
            kl = algorithms.k3(logprobs, reference).sum()
        now = logprobs.detach()
        return (
            loss,
            len(forest.entry),
            {
                "loss": loss.detach().clone(),  # the schedule scales the loss in place
                "entropy": entropy.detach(),
                "kl": kl.detach(),
                "policy_kl": algorithms.k3(now, old).sum(),
                "clip_fraction": policy.clipped.float().sum(),
                "ratio_mean": policy.ratio.sum(),
                "ratio_max": policy.ratio.max(),
                "tis_mean": weight.sum(),
                "logprobs": now,
            },
        )

    return objective


def _to(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)

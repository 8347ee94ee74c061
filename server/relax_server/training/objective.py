"""The training objective of one forest: from what the model predicts to a sum of token losses and what is reported of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from relax_sdk.config import AlgorithmConfig, SamplingParams
from relax_server.training import algorithms
from relax_server.training.forest import Forest
from relax_server.training.scoring import Predictions, Scores, score

LossSum = tuple[Tensor, int, dict[str, Tensor]]


@dataclass(frozen=True)
class Targets:
    """All that the loss needs of each trained token of the batch, on the device, in the order of `TokenBatch.trained`."""

    token: Tensor
    """int64 [n]."""
    engine: Tensor
    """float32 [n], logprobs as sampled: of the behavior policy."""
    advantage: Tensor
    """float32 [n]."""
    scale: Tensor
    """float32 [n], what each token counts, from `AlgorithmConfig.aggregation`; of mean 1 in each update."""
    recomputed: Tensor | None = None
    """float32 [n], the trainer's logprobs before the first of several updates; a single one has them from its own forward."""
    reference: Tensor | None = None
    """float32 [n], of the frozen reference."""
    banned: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """int64 [b]."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """`temperature`, `top_p` and `top_k` that the tokens were sampled with."""


def token_scores(predictions: Predictions, forest: Forest, targets: Targets, *, entropy: bool = False) -> Scores:
    """Log probabilities of a forest's trained tokens, [n of the forest], and the entropy of its rows if asked for, [r]."""
    row, entry = _to(forest.row, targets.token), _to(forest.entry, targets.token)
    return score(predictions, row, targets.token[entry], targets.banned, targets.sampling, entropy=entropy)


def cross_entropy(predictions: Predictions, forest: Forest, targets: Targets) -> LossSum:
    """-log p summed over the trained tokens."""
    loss = -token_scores(predictions, forest, targets).logprobs.sum()
    return loss, len(forest.entry), {"loss": loss.detach().clone()}


def policy_objective(config: AlgorithmConfig) -> Callable[[Predictions, Forest, Targets], LossSum]:
    """The loss of reinforcement learning, summed over the trained tokens of a forest.

    Per token: scale x (correction(proximal, behavior) x policy_loss - entropy_coef x entropy
    + kl_coef x correction(current, behavior) x kl_estimator), each as the configuration names it. With `old_logprobs="engine"`
    the proximal policy is the behavior policy, and the first correction is exactly 1.

    Raises:
        ConfigError: the configuration names what there is not.
    """
    proximal = algorithms.PROXIMAL[config.old_logprobs]
    policy_loss = algorithms.find("policy_loss", config.policy_loss)
    correction = algorithms.find("correction", config.correction)
    penalty = algorithms.find("kl_estimator", config.kl_estimator)

    def objective(predictions: Predictions, forest: Forest, targets: Targets) -> LossSum:
        row, entry = _to(forest.row, targets.token), _to(forest.entry, targets.token)
        scores = score(predictions, row, targets.token[entry], targets.banned, targets.sampling, entropy=True)
        logprobs, engine = scores.logprobs, targets.engine[entry]
        now, scale = logprobs.detach(), targets.scale[entry]
        old = proximal(logprobs, engine, _entries(targets.recomputed, entry))
        weight, current = correction(old, engine, config), correction(now, engine, config)
        policy = policy_loss(logprobs, old, targets.advantage[entry], config)
        assert scores.entropy is not None
        entropy = scores.entropy if config.entropy_coef else scores.entropy.detach()
        entropy = entropy.index_select(0, row)
        reference = _entries(targets.reference, entry)
        kl = torch.zeros_like(logprobs) if reference is None else current * penalty(logprobs, reference)
        loss = (scale * (weight * policy.loss - config.entropy_coef * entropy + config.kl_coef * kl)).sum()
        return (
            loss,
            len(forest.entry),
            {
                "loss": loss.detach().clone(),  # the schedule scales the loss in place
                "entropy": entropy.detach().sum(),
                "kl": (current * algorithms.k3(now, now if reference is None else reference)).sum(),
                "policy_kl": (weight * algorithms.k3(old, now)).sum(),
                "clip_fraction": policy.clipped.float().sum(),
                "ratio_mean": policy.ratio.sum(),
                "ratio_max": policy.ratio.max(),
                "tis_mean": weight.sum(),
                "logprobs": now,
                "entropies": entropy.detach(),
            },
        )

    return objective


def _entries(values: Tensor | None, entry: Tensor) -> Tensor | None:
    return None if values is None else values[entry]


def _to(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)

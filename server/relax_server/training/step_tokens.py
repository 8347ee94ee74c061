"""What a training step computes for each of its trained tokens, before its first update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relax_server.training.batch import TokenBatch
from relax_server.training.forest import Forest
from relax_server.training.megatron import parallel
from relax_server.training.samples import StepSamples

TEXT = "text"
"""The modality of a sample without media."""


class StepTokens:
    """The trainer's logprob, the entropy and the advantage of every trained token of a step.

    Arrays are [n], in the order of `TokenBatch.trained`: samples in their order, in each its tokens with loss mask 1.

    Args:
        collected: the samples of the step, and whose they are.
        batch: of them.
        advantages: float32 [n].
    """

    def __init__(self, collected: StepSamples, batch: TokenBatch, advantages: np.ndarray) -> None:
        self.collected, self.advantages = collected, advantages
        self.sample, self.engine = batch.trained.sample, batch.trained.logprob
        n = len(batch.trained)
        self.logprobs = np.full(n, np.nan, np.float32)
        """Natural log; NaN where a token was seen only after an update."""
        self.entropy = np.full(n, np.nan, np.float32)
        """Nats, when the token was first seen."""

    def take(self, forest: Forest, result: dict[str, Any], logprobs: Any) -> None:
        """Take what the forward of one forest gave.

        Args:
            forest: of this rank.
            result: of the objective.
            logprobs: tensor [n of the forest], before the first update; None: not known.
        """
        self.entropy[forest.entry] = result["entropies"].cpu().numpy()
        if logprobs is not None:
            self.logprobs[forest.entry] = logprobs.cpu().numpy()

    def gather(self) -> None:
        """Bring together what the data-parallel ranks have computed; each then has all of it."""
        for values in (self.logprobs, self.entropy):
            values[:] = parallel.known_on_any_rank(values)

    @property
    def gap(self) -> np.ndarray:
        """float64 [n]: absolute difference of the engine's and the trainer's logprobs, nats; NaN where it is not known."""
        return np.abs(self.logprobs - self.engine)

    def gaps(self) -> dict[str, float]:
        """`logprob_gap_mean`, `logprob_gap_max` and, for each modality, the mean over the tokens of samples that hold it."""
        gap = self.gap
        known = np.isfinite(gap)
        out = {
            "logprob_gap_mean": float(gap[known].mean()) if known.any() else 0.0,
            "logprob_gap_max": float(gap[known].max(initial=0.0)),
        }
        kinds = [{ref.kind for ref in sample.media} or {TEXT} for sample in self.collected.samples]
        for kind in sorted(set().union(*kinds)):
            own = known & np.array([kind in held for held in kinds])[self.sample]
            if own.any():
                out[f"logprob_gap_{kind}"] = float(gap[own].mean())
        return out

    def by_sample(self, values: np.ndarray) -> Sequence[np.ndarray]:
        """The part of each sample in an array [n]."""
        return np.split(values, np.searchsorted(self.sample, np.arange(1, len(self.collected.samples))))

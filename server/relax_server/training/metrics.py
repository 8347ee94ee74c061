"""The metrics that one training step reports."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from relax_server.training.batch import TokenBatch
from relax_server.training.forest import Forest
from relax_server.training.megatron import parallel
from relax_server.training.samples import StepSamples
from relax_server.training.step_tokens import StepTokens

SUMS = ("loss", "entropy", "kl", "policy_kl", "clip_fraction", "ratio_mean", "tis_mean")
"""Reported per trained token."""


class StepMetrics:
    """Collects the metrics of one step.

    | metric | meaning |
    |---|---|
    | `loss` | mean over the trained tokens of all ranks |
    | `reward`, `reward_std` | mean over trajectories; mean over groups of their standard deviation |
    | `entropy` | mean over trained tokens, nats |
    | `grad_norm`, `lr` | before clipping (mean over updates); of this step |
    | `kl` | k3 of KL(current policy || reference), tokens weighed by `correction`; 0 without a reference |
    | `policy_kl` | k3 of KL(old policy || current policy), where the old one is that of the ratio; weighed by `correction` |
    | `clip_fraction`, `ratio_mean`, `ratio_max` | of the policy loss, and of its ratio |
    | `tis_mean` | weight by `correction` of the policy loss |
    | `logprob_gap_mean`, `logprob_gap_max` | abs difference of engine and trainer before the first update |
    | `logprob_gap_audio`, `…_image`, `…_video`, `…_text` | its mean over samples that hold such media, or none |
    | `zero_variance_groups` | groups whose rewards are all equal |
    | `token_staleness_mean`, `token_staleness_max` | optimizer steps from each token's weights to those of the step |
    | `n_groups`, `n_samples`, `n_response_tokens` | size of the batch |
    | `forest_tokens`, `forests` | tokens computed, and in how many micro-batches |
    | `padded_tokens`, `packed_tokens` | tokens of a padded rectangle instead; of samples packed one after the other |
    | `shared` | 1 if prefixes were shared, 0 if sharing was off or would have saved too little |
    | `updates` | optimizer steps taken |
    | `seconds_…` | plan, features, logprobs, forward_backward, optimizer, total |
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._sums: dict[str, float] = dict.fromkeys(SUMS, 0.0)
        self._max = {"ratio_max": 0.0}
        self._norms: list[float] = []
        self.spans: list[tuple[str, float, float]] = []
        """Stage, begin and end in seconds since the epoch."""
        self._seconds: dict[str, float] = dict.fromkeys(("plan", "features", "logprobs", "forward_backward", "optimizer"), 0.0)
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def seconds(self, stage: str) -> Iterator[None]:
        """Add the time of a block to a stage."""
        began, at = time.perf_counter(), time.time()
        try:
            yield
        finally:
            self._seconds[stage] += time.perf_counter() - began
            self.spans.append((stage, at, time.time()))

    def describe(self, collected: StepSamples, batch: TokenBatch, parts: Sequence[Sequence[Forest]], version: int) -> None:
        """Record what is known before anything is computed."""
        computed, packed = sum(len(forest) for forests in parts for forest in forests), int(batch.n_inputs.sum())
        staleness = version - batch.trained.version
        self.values |= {
            "reward": collected.reward,
            "reward_std": collected.reward_std,
            "zero_variance_groups": collected.zero_variance_groups,
            "token_staleness_mean": float(staleness.mean()),
            "token_staleness_max": float(staleness.max()),
            "n_groups": len(set(collected.group)),
            "n_samples": len(batch),
            "n_response_tokens": len(batch.trained),
            "forest_tokens": computed,
            "forests": sum(map(len, parts)),
            "padded_tokens": batch.padded_tokens,
            "packed_tokens": packed,
            "shared": int(computed < packed),
            "updates": len(parts),
        }

    def update(self, results: Sequence[dict[str, Any]]) -> None:
        """Add the sums of one update.

        Args:
            results: per forest of this rank, from the objective.
        """
        for result in results:
            for name in SUMS:
                self._sums[name] += float(result[name])
            self._max["ratio_max"] = max(self._max["ratio_max"], float(result["ratio_max"]))

    def stepped(self, grad_norm: float, lr: float) -> None:
        """Record that one optimizer step was taken."""
        self._norms.append(grad_norm)
        self.values["lr"] = lr

    def result(self, tokens: StepTokens) -> dict[str, float]:
        """Return all metrics, the same on every data-parallel rank but for the times.

        Args:
            tokens: of the step, gathered from all ranks.
        """
        sums = parallel.sum_over_ranks([*self._sums.values()])
        largest = parallel.max_over_ranks(list(self._max.values()))
        n = self.values["n_response_tokens"]
        out = {name: value / n for name, value in zip(self._sums, sums, strict=True)}
        out |= dict(zip(self._max, largest, strict=True))
        out |= tokens.gaps()
        out["grad_norm"] = float(np.mean(self._norms))
        out |= {f"seconds_{stage}": value for stage, value in self._seconds.items()}
        out["seconds_total"] = time.perf_counter() - self._began
        return {name: float(value) for name, value in (self.values | out).items()}

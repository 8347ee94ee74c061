"""Means with intervals, pass@k and differences of paired evaluations; pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z95 = 1.959964
"""The 97.5% quantile of the normal distribution."""
RESAMPLES = 10_000
"""Bootstrap samples."""
CHUNK = 1 << 22
"""Numbers that are resampled at once, at most."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95% interval, `mean - ci95` to `mean + ci95`."""

    mean: float
    ci95: float
    """Half width; infinite where there is one task only, NaN where there is none."""
    n: int
    """Values that the mean is of."""

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.ci95:.3f}" if math.isfinite(self.ci95) else f"{self.mean:.3f}"


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences and its 95% interval, `low` to `high`."""

    mean: float
    low: float
    high: float
    n: int
    """Pairs."""

    @property
    def significant(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def clustered_mean(clusters: Sequence[Sequence[float]]) -> Estimate:
    """The mean of all values, its interval clustered: values of one cluster (the samples of one task) are not independent.

    The standard error is `sqrt(C / (C - 1) * sum_c (sum_i (x_ci - mean))^2) / n` over the C clusters with n values in all
    (Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640, equation 4, with the usual factor C / (C - 1) for few
    clusters), and the interval the normal one, `mean ± 1.96 SE`. With one value in each cluster this is `s / sqrt(n)`.

    Args:
        clusters: values by task; empty ones are left out.
    """
    clusters = [values for values in clusters if values]
    n, count = sum(map(len, clusters)), len(clusters)
    if not n:
        return Estimate(math.nan, math.nan, 0)
    mean = math.fsum(x for values in clusters for x in values) / n
    if count == 1:
        return Estimate(mean, math.inf, n)
    squares = math.fsum(math.fsum(x - mean for x in values) ** 2 for values in clusters)
    return Estimate(mean, Z95 * math.sqrt(count / (count - 1) * squares) / n, n)


def pass_at_k(n: int, successes: int, k: int) -> float:
    """The probability that one of `k` samples of a task succeeds, estimated without bias from `n` of which some did.

    `1 - C(n - c, k) / C(n, k)`, computed as a product (Chen et al. 2021, arXiv 2107.03374, equation 1 and figure 3).

    Args:
        n: samples, `k` at least.
        successes: of them.
        k: samples drawn.

    Raises:
        ValueError: fewer than `k` samples.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs {k} samples or more, got {n}")
    if n - successes < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - successes + 1, n + 1))


def paired_difference(before: Sequence[float], after: Sequence[float], seed: int = 0) -> Difference:
    """The mean of `after - before`, with the percentile interval of a paired bootstrap over tasks.

    Tasks are drawn with replacement, both values of a task together, 10,000 times; the interval is from the 2.5% to the 97.5%
    quantile of the means (Efron and Tibshirani 1993, chapter 13; for paired systems Koehn 2004, "Statistical Significance
    Tests for Machine Translation Evaluation").

    Args:
        before: one value a task.
        after: of the same tasks in the same order.
        seed: of the resampling, so that the same data give the same interval.

    Raises:
        ValueError: they are not of the same length.
    """
    if len(before) != len(after):
        raise ValueError(f"{len(before)} and {len(after)} values are not pairs")
    changes = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    n = len(changes)
    if n == 0:
        return Difference(math.nan, math.nan, math.nan, 0)
    if n == 1:
        return Difference(float(changes[0]), -math.inf, math.inf, 1)
    rng, means = np.random.default_rng(seed), []
    left = RESAMPLES
    while left:
        rows = min(left, max(1, CHUNK // n))
        means.append(changes[rng.integers(0, n, (rows, n))].mean(axis=1))
        left -= rows
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Difference(float(changes.mean()), float(low), float(high), n)

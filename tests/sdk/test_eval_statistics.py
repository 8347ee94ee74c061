"""Means with clustered intervals, pass@k, and differences of paired evaluations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_sdk.evals.statistics import clustered_mean, paired_difference, pass_at_k


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_all_draws_with_a_success(n: int):
    for successes, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([1] * successes + [0] * (n - successes), k))
        assert pass_at_k(n, successes, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_needs_k_samples():
    with pytest.raises(ValueError, match="needs 4 samples or more, got 3"):
        pass_at_k(3, 1, 4)


def test_one_value_a_task_gives_the_usual_interval():
    values = [0.0, 1.0, 1.0, 0.5]
    found = clustered_mean([[v] for v in values])
    assert found.mean == pytest.approx(0.625) and found.n == 4
    assert found.ci95 == pytest.approx(1.959964 * np.std(values, ddof=1) / math.sqrt(4))


def test_copies_of_a_sample_make_an_interval_no_narrower():
    once, often = clustered_mean([[0.0], [1.0], [1.0]]), clustered_mean([[0.0] * 50, [1.0] * 50, [1.0] * 50])
    assert often.ci95 == pytest.approx(once.ci95) and often.mean == pytest.approx(once.mean) and often.n == 150


def test_the_interval_covers_the_truth_where_one_that_takes_samples_for_independent_does_not():
    rng, covered, naive = np.random.default_rng(0), 0, 0
    for _ in range(400):
        chances = rng.beta(0.5, 0.5, 60)  # tasks differ much, the samples of one do not
        values = (rng.random((60, 16)) < chances[:, None]).astype(float)
        found, plain = clustered_mean(values.tolist()), 1.96 * values.std() / math.sqrt(values.size)
        covered += abs(found.mean - 0.5) <= found.ci95
        naive += abs(found.mean - 0.5) <= plain
    assert 0.92 <= covered / 400 <= 0.98 and naive / 400 < 0.6, (covered, naive)


def test_one_task_has_no_interval_and_none_no_mean():
    assert clustered_mean([[1.0, 0.0], []]).ci95 == math.inf
    assert math.isnan(clustered_mean([[], []]).mean)


def test_a_difference_is_paired():
    rng = np.random.default_rng(1)
    hard = rng.random(200)
    before, after = hard, hard + 0.02 + rng.normal(0, 0.01, 200)
    found = paired_difference(before.tolist(), after.tolist())
    assert found.mean == pytest.approx(0.02, abs=0.003) and found.significant and 0.015 < found.low < found.high < 0.025
    unpaired = paired_difference(rng.permutation(before).tolist(), after.tolist())
    assert unpaired.high - unpaired.low > 20 * (found.high - found.low)


def test_a_difference_comes_out_the_same_again_and_mirrored():
    a, b = [0.0, 1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0, 1.0]
    assert paired_difference(a, b) == paired_difference(a, b)
    there, back = paired_difference(a, b), paired_difference(b, a)
    assert (there.mean, there.low, there.high) == pytest.approx((-back.mean, -back.high, -back.low))


def test_one_pair_says_nothing_and_unequal_lengths_are_refused():
    assert not paired_difference([0.0], [1.0]).significant
    with pytest.raises(ValueError, match="not pairs"):
        paired_difference([0.0], [])


@given(st.lists(st.lists(st.floats(-5, 5), max_size=4), max_size=8))
def test_the_mean_is_that_of_all_values(clusters: list[list[float]]):
    values = [x for cluster in clusters for x in cluster]
    found = clustered_mean(clusters)
    assert found.n == len(values)
    if values:
        assert found.mean == pytest.approx(np.mean(values), abs=1e-9) and found.ci95 >= 0

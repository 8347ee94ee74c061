"""Logits to tokens: the distribution that is sampled, and the logprob that is reported."""

import numpy as np
import pytest
import torch
from relax_server.engines.embedded.sampling import Sampling, sample, uniforms

N = 20_000
NONE = torch.empty(0, dtype=torch.int64)
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 3.0])


def draw(params: Sampling, banned: torch.Tensor = NONE, logits: torch.Tensor = LOGITS):
    return sample(logits.repeat(N, 1), [params] * N, np.arange(N, dtype=np.uint64), np.zeros(N, np.uint64), banned)


def frequencies(tokens: list[int]) -> np.ndarray:
    return np.bincount(tokens, minlength=len(LOGITS)) / N


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_and_logprobs_are_those_of_the_softmax(temperature):
    out = draw(Sampling(temperature=temperature))
    expected = (LOGITS / temperature).log_softmax(-1)
    assert np.abs(frequencies(out.tokens) - expected.exp().numpy()).max() < 0.015  # over 4 standard deviations
    np.testing.assert_allclose(out.logprobs, expected[out.tokens], atol=1e-6)


def test_banned_ids_are_never_sampled_however_likely():
    banned = torch.tensor([0, 5])
    out = draw(Sampling(), banned, LOGITS + torch.tensor([50.0, 0, 0, 0, 0, 50.0]))
    assert not {0, 5} & set(out.tokens)
    rest = LOGITS.clone()
    rest[banned] = -torch.inf
    np.testing.assert_allclose(out.logprobs, rest.log_softmax(-1)[out.tokens], atol=1e-6)


def test_top_k_and_top_p_cut_the_tail_and_logprobs_are_of_what_is_left():
    logprobs = LOGITS.log_softmax(-1)
    k = draw(Sampling(top_k=2))
    assert set(k.tokens) == {0, 5}
    left = torch.full_like(LOGITS, -torch.inf)
    left[[0, 5]] = LOGITS[[0, 5]]
    np.testing.assert_allclose(k.logprobs, left.log_softmax(-1)[k.tokens], atol=1e-6)
    share = float(logprobs[5].exp() / (logprobs[5].exp() + logprobs[0].exp()))
    assert abs(frequencies(k.tokens)[5] - share) < 0.015
    p = float(logprobs.exp()[5]) + 1e-3  # just over the mass of the most likely token
    nucleus = draw(Sampling(top_p=p))
    assert set(nucleus.tokens) == {0, 5}
    np.testing.assert_allclose(nucleus.logprobs, left.log_softmax(-1)[nucleus.tokens], atol=1e-6)


def test_greedy_reports_the_logprob_of_temperature_one():
    out = draw(Sampling(temperature=0.0))
    assert set(out.tokens) == {5}
    np.testing.assert_allclose(out.logprobs, float(LOGITS.log_softmax(-1)[5]), atol=1e-6)


def test_rows_of_different_parameters_do_not_mix():
    params = [Sampling(temperature=0), Sampling(logit_bias={4: 100.0}), Sampling(top_k=1), Sampling(top_logprobs=2)]
    out = sample(LOGITS.repeat(4, 1), params, np.arange(4, dtype=np.uint64), np.zeros(4, np.uint64), NONE)
    assert out.tokens[:3] == [5, 4, 5]
    assert out.top is not None and [len(row) for row in out.top] == [0, 0, 0, 2]
    assert [id for _, id in out.top[3]] == [5, 0]


def test_uniforms_are_uniform_and_depend_on_seed_and_index():
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 100)
    index = np.tile(np.arange(100, dtype=np.uint64), 200)
    u = uniforms(seeds, index)
    assert ((u >= 0) & (u < 1)).all() and len(np.unique(u)) == len(u)
    assert np.abs(np.histogram(u, 20, (0, 1))[0] / len(u) - 0.05).max() < 0.01
    table = u.reshape(200, 100)
    assert np.abs(np.corrcoef(table)[np.triu_indices(200, 1)]).mean() < 0.12
    assert np.abs(np.corrcoef(table.T)[np.triu_indices(100, 1)]).mean() < 0.12
    np.testing.assert_array_equal(u, uniforms(seeds, index))


def test_logits_that_are_not_finite_raise():
    with pytest.raises(ValueError, match="not finite"):
        sample(torch.full((1, 6), torch.nan), [Sampling()], np.zeros(1, np.uint64), np.zeros(1, np.uint64), NONE)

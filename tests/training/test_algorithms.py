"""Advantages, losses and corrections against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from relax_server.training import algorithms as rl


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_grpo():
    # mean 1/2, sample standard deviation sqrt((3 * 1/4 + 1/4) / 3) = sqrt(1/3)
    got = rl.grpo(tensor(1, 0, 1, 0))
    torch.testing.assert_close(got, tensor(1, -1, 1, -1) * 0.5 / (math.sqrt(1 / 3) + 1e-6))


def test_dr_grpo():
    torch.testing.assert_close(rl.dr_grpo(tensor(3, 1, 2, 6)), tensor(0, -2, -1, 3))


def test_rloo():
    # 3 - (1 + 2 + 6) / 3 = 0, 1 - 11 / 3, 2 - 10 / 3, 6 - 2
    torch.testing.assert_close(rl.rloo(tensor(3, 1, 2, 6)), tensor(0, -8 / 3, -4 / 3, 4))


@pytest.mark.parametrize("name", sorted(rl.ADVANTAGES))
@given(value=st.floats(-1e6, 1e6), n=st.integers(1, 9))
def test_equal_rewards_teach_nothing(name, value, n):
    assert (rl.ADVANTAGES[name](torch.full((n,), value, dtype=torch.float64)) == 0).all()


def test_turn_returns():
    # turns earn 1, 0, 2; scoring adds 0.5 at the end
    assert rl.turn_returns([1.0, 0.0, 2.0], 3.5) == [3.5, 2.5, 2.5]
    assert rl.turn_returns([], 1.0) == []
    assert rl.turn_returns([1.0, 0.0, 2.0], 3.5, gamma=0.0) == [1.0, 0.0, 2.5]
    assert rl.turn_returns([1.0, 0.0, 2.0], 3.0, gamma=0.5) == [1.5, 1.0, 2.0]


def test_turns_are_compared_at_the_same_place():
    returns = [[4.0, 1.0, 1.0], [2.0, 3.0], [0.0]]
    assert rl.turn_advantages(returns, rl.dr_grpo) == [[2.0, -1.0, 0.0], [0.0, 1.0], [-2.0]]
    assert rl.turn_advantages(returns, rl.rloo) == [[3.0, -2.0, 0.0], [0.0, 2.0], [-3.0]]


def test_clipped_policy_loss():
    ratio = tensor(1.5, 1.5, 0.5, 0.5, 1.1)
    advantage = tensor(2, -2, 2, -2, 1)
    logprobs = ratio.log().requires_grad_()
    got = rl.clipped_policy_loss(logprobs, torch.zeros(5, dtype=torch.float64), advantage, 0.2, 0.28)
    # A > 0 is bounded above by 1.28, A < 0 below by 0.8
    torch.testing.assert_close(got.loss, tensor(-2.56, 3.0, -1.0, 1.6, -1.1))
    assert got.clipped.tolist() == [True, False, False, True, False]
    got.loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, tensor(0, 3.0, -1.0, 0, -1.1))


def test_kl_estimates():
    policy, reference = tensor(-1.0, -2.0), tensor(-1.5, -1.0)
    torch.testing.assert_close(rl.k1(policy, reference), tensor(0.5, -1.0))
    torch.testing.assert_close(rl.k2(policy, reference), tensor(0.125, 0.5))
    torch.testing.assert_close(rl.k3(policy, reference), tensor(math.exp(-0.5) - 0.5, math.e - 2))


def test_k3_is_an_unbiased_estimate_of_the_divergence():
    p, q = torch.softmax(tensor(0.3, -1, 2), 0), torch.softmax(tensor(1, 0.2, -0.5), 0)
    divergence = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * rl.k3(p.log(), q.log())).sum(), divergence)
    torch.testing.assert_close((p * rl.k1(p.log(), q.log())).sum(), divergence)


def test_truncated_importance_weights():
    trainer = tensor(-1.0, -1.0, -3.0).requires_grad_()
    got = rl.truncated_importance_weights(trainer, tensor(-1.2, -3.0, -2.0), 2.0)
    torch.testing.assert_close(got, tensor(math.exp(0.2), 2.0, math.exp(-1)))
    assert not got.requires_grad
    assert rl.truncated_importance_weights(trainer, tensor(0, 0, 0), 0.0).tolist() == [1, 1, 1]


def test_banned_tokens_and_temperature():
    logits = torch.tensor([[1.0, 2.0, 50.0, 3.0]], requires_grad=True)
    dist = rl.distribution(logits, torch.tensor([2]), temperature=2.0)
    p = torch.softmax(torch.tensor([0.5, 1.0, 1.5]), 0)
    torch.testing.assert_close(dist.logprobs[0, [0, 1, 3]], p.log())
    assert dist.logprobs[0, 2].exp() == 0
    torch.testing.assert_close(dist.entropy[0], -(p * p.log()).sum())
    (dist.entropy.sum() + dist.of(torch.tensor([0]), torch.tensor([1])).sum()).backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 2] == 0


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_gradients_of_the_kl_terms_are_those_of_the_two_divergences(name):
    logits = tensor(0.3, -1.2, 2.0, 0.0).requires_grad_()
    reference = torch.log_softmax(tensor(1.0, 0.5, -0.5, -2.0), 0)
    policy = torch.log_softmax(logits, 0)
    sampled = (policy.detach().exp() * rl.KL[name](policy, reference)).sum()  # the mean over tokens that the policy samples
    forward = (reference.exp() * (reference - policy)).sum()
    reverse = (policy.exp() * (policy - reference)).sum()
    (ours,) = torch.autograd.grad(sampled, logits, retain_graph=True)
    (theirs,) = torch.autograd.grad(reverse if name == "k2" else forward, logits)
    torch.testing.assert_close(ours, theirs)

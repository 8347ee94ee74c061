"""Advantages, losses and corrections against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from relax_server.training import algorithms as rl

from relax_sdk import ConfigError
from relax_sdk.algorithm import ALGORITHMS
from relax_sdk.config import AlgorithmConfig, SamplingParams

SETTINGS = AlgorithmConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0, tis_clip=2.0)


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


@pytest.mark.parametrize("name", rl.names("advantage"))
@given(value=st.floats(-1e6, 1e6), n=st.integers(1, 9))
def test_equal_rewards_teach_nothing(name, value, n):
    assert (rl.find("advantage", name)(torch.full((n,), value, dtype=torch.float64)) == 0).all()


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
    got = rl.clipped_policy_loss(logprobs, torch.zeros(5, dtype=torch.float64), advantage, SETTINGS)
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
    got = rl.truncated_importance_weights(trainer, tensor(-1.2, -3.0, -2.0), SETTINGS)
    torch.testing.assert_close(got, tensor(math.exp(0.2), 2.0, math.exp(-1)))
    assert not got.requires_grad
    assert rl.truncated_importance_weights(trainer, trainer, SETTINGS).tolist() == [1, 1, 1]
    assert rl.truncated_importance_weights(tensor(0.0), tensor(-1e30), SETTINGS).tolist() == [2.0]
    assert rl.no_correction(trainer, tensor(0, 0, 0), SETTINGS).tolist() == [1, 1, 1]


def test_banned_tokens_and_temperature():
    logits = torch.tensor([[1.0, 2.0, 50.0, 3.0]], requires_grad=True)
    dist = rl.distribution(logits, torch.tensor([2]), SamplingParams(temperature=2.0))
    p = torch.softmax(torch.tensor([0.5, 1.0, 1.5]), 0)
    torch.testing.assert_close(dist.logprobs[0, [0, 1, 3]], p.log())
    assert dist.logprobs[0, 2].exp() == 0
    torch.testing.assert_close(dist.entropy[0], -(p * p.log()).sum())
    (dist.entropy.sum() + dist.of(torch.tensor([0]), torch.tensor([1])).sum()).backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 2] == 0


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, -1), (1.0, 3), (0.6, 4), (1e-6, -1)])
def test_logprobs_are_those_that_the_engine_reports_under_top_p_and_top_k(top_p: float, top_k: int) -> None:
    import numpy as np
    from relax_server.engines.embedded.sampling import Sampling, sample

    torch.manual_seed(0)
    rows, banned = 64, torch.tensor([3, 7])
    logits = 2 * torch.randn(rows, 40)
    seeds, zeros = np.arange(rows, dtype=np.uint64), np.zeros(rows, np.uint64)
    drawn = sample(logits.clone(), [Sampling(temperature=0.7, top_p=top_p, top_k=top_k)] * rows, seeds, zeros, banned)
    dist = rl.distribution(logits, banned, SamplingParams(temperature=0.7, top_p=top_p, top_k=top_k))
    ours = dist.of(torch.arange(rows), torch.tensor(drawn.tokens))
    torch.testing.assert_close(ours, torch.tensor(drawn.logprobs), atol=1e-6, rtol=0)
    torch.testing.assert_close(dist.logprobs.exp().sum(-1), torch.ones(rows))
    assert (dist.entropy >= 0).all()


def test_a_sampled_token_outside_the_cut_has_a_finite_logprob_and_a_gradient():
    logits = torch.tensor([3.0, 2.0, 1.0, -1.0]).log_softmax(-1)[None].requires_grad_()
    dist = rl.distribution(logits, torch.zeros(0, dtype=torch.long), SamplingParams(top_k=2))
    outside = dist.of(torch.tensor([0, 0]), torch.tensor([2, 0]))
    p = logits[0].detach().exp()
    expected = torch.stack([(p[2] / (p[0] + p[1] + p[2])).log(), (p[0] / (p[0] + p[1])).log()])
    torch.testing.assert_close(outside, expected)
    (gradient,) = torch.autograd.grad(outside[0], logits, retain_graph=True)
    q = p[:3] / p[:3].sum()
    torch.testing.assert_close(gradient[0], torch.tensor([-q[0], -q[1], 1 - q[2], 0.0]))
    (entropy,) = torch.autograd.grad(
        rl.distribution(logits, torch.zeros(0, dtype=torch.long), SamplingParams(top_k=2)).entropy, logits
    )
    assert torch.isfinite(entropy).all()


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_gradients_of_the_kl_terms_are_those_of_the_two_divergences(name):
    logits = tensor(0.3, -1.2, 2.0, 0.0).requires_grad_()
    reference = torch.log_softmax(tensor(1.0, 0.5, -0.5, -2.0), 0)
    policy = torch.log_softmax(logits, 0)
    sampled = (
        policy.detach().exp() * rl.find("kl_estimator", name)(policy, reference)
    ).sum()  # the mean over tokens that the policy samples
    forward = (reference.exp() * (reference - policy)).sum()
    reverse = (policy.exp() * (policy - reference)).sum()
    (ours,) = torch.autograd.grad(sampled, logits, retain_graph=True)
    (theirs,) = torch.autograd.grad(reverse if name == "k2" else forward, logits)
    torch.testing.assert_close(ours, theirs)


@given(advantage=st.floats(-5, 5), off=st.floats(-100, 100))
def test_no_ratio_multiplies_a_gradient_beyond_the_dual_clip(advantage: float, off: float) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    got = rl.clipped_policy_loss(logprobs, logprobs.detach() - off, torch.tensor([advantage]), SETTINGS)
    (gradient,) = torch.autograd.grad(got.loss.sum(), logprobs)
    assert abs(float(gradient)) <= 3.0 * abs(advantage) * (1 + 1e-6)
    assert float(got.loss.detach()) <= 3.0 * abs(advantage) * (1 + 1e-6)


@pytest.mark.parametrize("off", [15.0, 20.0])
def test_a_token_far_off_with_a_negative_advantage_stops_its_gradient(off: float) -> None:
    logprobs = tensor(-1.0, -1.0).requires_grad_()
    got = rl.clipped_policy_loss(logprobs, tensor(-1.0 - off, -1.0), tensor(-2.0, -2.0), SETTINGS)
    torch.testing.assert_close(got.loss, tensor(6.0, 2.0))
    assert got.clipped.tolist() == [True, False]
    (gradient,) = torch.autograd.grad(got.loss.sum(), logprobs)
    assert gradient.tolist() == [0.0, 2.0]


@given(st.lists(st.floats(-5, 5, width=32, allow_subnormal=False), min_size=1, max_size=5))
def test_on_policy_the_gradient_is_the_advantage_exactly(advantages: list[float]) -> None:
    logprobs = torch.full((len(advantages),), -1.3, requires_grad=True)
    got = rl.clipped_policy_loss(logprobs, logprobs.detach(), torch.tensor(advantages), SETTINGS)
    (gradient,) = torch.autograd.grad(got.loss.sum(), logprobs)
    assert torch.equal(gradient, -torch.tensor(advantages))


@pytest.mark.parametrize("name", rl.names("kl_estimator"))
def test_kl_terms_have_bounded_gradients_and_agree_with_the_estimates_near_by(name: str) -> None:
    d = tensor(-60, -20, -15, -2.3, -0.5, 0.0, 0.5, 9.0, 30.0)
    logprobs = (d - 70).requires_grad_()
    term = rl.find("kl_estimator", name)(logprobs, torch.full_like(d, -70))
    (gradient,) = torch.autograd.grad(term.sum(), logprobs)
    assert torch.isfinite(term).all()
    assert (gradient.abs() <= {"k2": 10, "k3": 100}[name] * (1 + 1e-9)).all()
    assert (gradient[1:] >= gradient[:-1] - 1e-9).all(), "farther off pulls no less"
    estimate = {"k2": rl.k2, "k3": rl.k3}[name]
    torch.testing.assert_close(term[3:7], estimate(logprobs, torch.full_like(d, -70))[3:7])


def test_the_k3_term_pulls_with_its_whole_weight_on_answers_the_policy_has_nearly_given_up() -> None:
    reference = torch.full((4,), 0.25).double().log()
    logits = torch.tensor([0.0, 0.0, 0.0, -4.5], dtype=torch.float64).requires_grad_()  # p of the last: 0.0037
    policy = torch.log_softmax(logits, 0)
    mean = (
        policy.detach().exp() * rl.find("kl_estimator", "k3")(policy, reference)
    ).sum()  # of a token that the policy samples
    divergence = (reference.exp() * (reference - policy)).sum()
    (got,), (exact,) = (torch.autograd.grad(value, logits, retain_graph=True) for value in (mean, divergence))
    torch.testing.assert_close(got, exact)


@pytest.mark.parametrize("name", rl.names("kl_estimator"))
def test_weighed_kl_terms_have_their_gradients_on_tokens_of_an_older_policy_too(name: str) -> None:
    logits = tensor(0.3, -1.2, 1.0, 0.0).requires_grad_()
    reference = torch.log_softmax(tensor(1.0, 0.5, -0.5, -1.0), 0)
    older = torch.log_softmax(tensor(0.6, -0.9, 0.8, -0.3), 0)  # no ratio reaches tis_clip
    policy = torch.log_softmax(logits, 0)
    weight = rl.truncated_importance_weights(policy.detach(), older, SETTINGS)
    sampled = (older.exp() * weight * rl.find("kl_estimator", name)(policy, reference)).sum()
    exact = (policy.exp() * (policy - reference)).sum() if name == "k2" else (reference.exp() * (reference - policy)).sum()
    (ours,) = torch.autograd.grad(sampled, logits, retain_graph=True)
    (theirs,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(ours, theirs)


def test_what_tokens_count():
    sample = torch.tensor([3, 3, 3, 5, 8, 8])
    assert rl.token_mean(sample).tolist() == [1.0] * 6
    losses = tensor(1, 2, 3, 10, 4, 6)
    weights = rl.sample_mean(sample)
    assert float((weights * losses).mean()) == pytest.approx((2 + 10 + 5) / 3)
    assert float(weights.mean()) == pytest.approx(1)


# ------------------------------------------------------------------------------------------------------- the registry


def test_the_names_that_the_configuration_knows_are_those_that_are_registered():
    assert {kind: tuple(rl.names(kind)) for kind in rl.KINDS} == ALGORITHMS


def best_alone(rewards: torch.Tensor) -> torch.Tensor:
    """An advantage of a user's own."""
    return (rewards == rewards.max()).double()


def test_a_function_of_ones_own_is_named_by_where_it_is():
    config = AlgorithmConfig(advantage=f"{__name__}:best_alone")
    assert rl.find("advantage", config.advantage)(tensor(1, 3)).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "message"), [("best", "there are dr_grpo, grpo, rloo"), ("no.such:thing", "cannot be"), ("math:pi", "no function")]
)
def test_what_cannot_be_found_is_told(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rl.find("advantage", name)


@pytest.mark.parametrize("kind", sorted(ALGORITHMS))
def test_a_wrong_name_is_refused_before_a_run_begins(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"AlgorithmConfig\.{kind} = 'nothing'; allowed: .*package\.module:function"):
        AlgorithmConfig(**{kind: "nothing"})


# ----------------------------------------------------------------------------------------------------- the objective


def objective(settings: dict, logits: torch.Tensor, **targets: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The objective over one row of logits for every token."""
    import numpy as np
    from relax_server.training.objective import Targets, policy_objective
    from relax_server.training.scoring import Predictions

    class Rows:
        row = entry = np.arange(len(logits))

    n = len(logits)
    given = {"advantage": torch.zeros(n), "scale": torch.ones(n)} | targets
    predictions = Predictions(logits, torch.eye(logits.shape[1]))
    loss, _, results = policy_objective(AlgorithmConfig(**settings))(predictions, Rows(), Targets(**given))  # type: ignore[arg-type]
    return loss, results


@pytest.mark.parametrize("settings", [{}, {"old_logprobs": "recompute"}])
def test_policy_kl_is_the_divergence_from_the_old_policy_to_the_current_one(settings: dict) -> None:
    old, now = torch.tensor([0.9, 0.1]), torch.tensor([0.75, 0.25])
    exact = float((old * (old / now).log()).sum())
    n = 40_000
    token = (torch.arange(n) >= int(n * 0.9)).long()  # just as often as the old policy samples each
    logits = now.log().expand(n, 2)
    sampled = old.log()[token]
    _, results = objective(settings, logits, token=token, engine=sampled, recomputed=sampled)
    assert float(results["policy_kl"]) / n == pytest.approx(exact, rel=1e-3)


def test_reported_divergences_are_exact_for_tokens_of_an_older_policy() -> None:
    """`kl` is of the current policy, and `policy_kl` of the recomputed one, whatever policy has sampled the tokens."""
    behavior, old, now, reference = (torch.tensor([1 - p, p]) for p in (0.3, 0.25, 0.2, 0.4))
    exact = {"policy_kl": (old * (old / now).log()).sum(), "kl": (now * (now / reference).log()).sum()}
    n = 10_000
    token = (torch.arange(n) >= int(n * 0.7)).long()
    logprobs = {name: p.log()[token] for name, p in dict(engine=behavior, recomputed=old, reference=reference).items()}
    _, results = objective({"old_logprobs": "recompute", "kl_coef": 0.1}, now.log().expand(n, 2), token=token, **logprobs)
    for name, divergence in exact.items():
        assert float(results[name]) / n == pytest.approx(float(divergence), rel=1e-3), name


def test_stale_tokens_are_corrected_where_old_logprobs_are_recomputed() -> None:
    token = torch.zeros(3, dtype=torch.long)
    now = torch.log_softmax(torch.tensor([0.0, 0.0]), 0)[0]
    engine = now - torch.tensor([0.0, math.log(1.5), math.log(10.0)])  # what was sampled has become likelier
    logits = torch.zeros(3, 2, requires_grad=True)
    gradients = {}
    for correction in ("tis", "none"):
        settings = {"old_logprobs": "recompute", "correction": correction, "entropy_coef": 0.0}
        loss, results = objective(settings, logits, token=token, engine=engine, advantage=torch.ones(3))
        (gradients[correction],) = torch.autograd.grad(loss, logits)
        assert results["ratio_max"] == 1
    ratio = gradients["tis"][:, 0] / gradients["none"][:, 0]
    torch.testing.assert_close(ratio, torch.tensor([1.0, 1.5, 2.0]))


def test_the_kl_term_of_a_stale_token_is_weighed_by_its_importance_ratio() -> None:
    token = torch.zeros(3, dtype=torch.long)
    now = torch.log_softmax(torch.tensor([0.0, 0.0]), 0)[0]
    engine = now - torch.tensor([0.0, math.log(0.5), math.log(10.0)])
    logits = torch.zeros(3, 2, requires_grad=True)
    settings = {"kl_coef": 1.0, "entropy_coef": 0.0}
    loss, _ = objective(settings, logits, token=token, engine=engine, reference=now.expand(3) - 0.3)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient[:, 0] / gradient[0, 0], torch.tensor([1.0, 0.5, 2.0]))

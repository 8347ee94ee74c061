"""Logprobs and entropy in parts are those of plain torch over all logits at once: in value and in every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from relax_server.training import scoring
from relax_server.training.algorithms import distribution
from relax_server.training.scoring import Predictions, score
from torch import Tensor

from relax_sdk.config import SamplingParams

ROWS, TOKENS, WIDTH, VOCABULARY = 23, 31, 6, 40
BANNED = torch.tensor([3, 17])
SAMPLINGS = {
    "plain": SamplingParams(),
    "heat": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(temperature=1.3, top_k=5),
    "top_p": SamplingParams(temperature=0.7, top_p=0.6),
}
WAYS = {"logprobs": (1.0, 0.0), "entropy": (0.0, 1.0), "both": (1.0, -0.3)}


def numbers(dtype: torch.dtype) -> dict[str, Tensor]:
    """A problem whose positions predict several tokens, the same one twice, or none; in no order."""
    draw = torch.Generator().manual_seed(0)
    row = torch.randint(0, ROWS - 1, (TOKENS,), generator=draw)
    token = torch.randint(18, VOCABULARY, (TOKENS,), generator=draw)
    row[5], token[5] = row[20], token[20]
    return {
        "hidden": torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64).to(dtype),
        "weight": torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=torch.float64).to(dtype),
        "row": row,
        "token": token,
        "by_logprob": torch.randn(TOKENS, generator=draw, dtype=torch.float64),
        "by_entropy": torch.randn(ROWS, generator=draw, dtype=torch.float64),
    }


def results(problem: dict[str, Tensor], sampling: str, way: str, plain: bool = False) -> list[Tensor]:
    """Logprobs, entropy, and the gradients of a weighed sum of them by the states and by the weight."""
    hidden, weight = (problem[name].clone().requires_grad_() for name in ("hidden", "weight"))
    row, token = problem["row"], problem["token"]
    if plain:
        found = distribution(hidden @ weight.t(), BANNED, SAMPLINGS[sampling])
        logprobs, entropy = found.of(row, token), found.entropy
    else:
        scores = score(Predictions(hidden, weight), row, token, BANNED, SAMPLINGS[sampling], entropy=True)
        assert scores.entropy is not None
        logprobs, entropy = scores.logprobs, scores.entropy
    a, b = WAYS[way]
    parts = [a * (problem["by_logprob"] * logprobs).sum()] * (a != 0) + [b * (problem["by_entropy"] * entropy).sum()] * (b != 0)
    sum(parts, torch.zeros(())).backward()
    assert hidden.grad is not None and weight.grad is not None
    return [logprobs.detach(), entropy.detach(), hidden.grad, weight.grad]


@pytest.fixture(params=[1, 5 * VOCABULARY, 7 * VOCABULARY + 3, 2**25])
def logits_at_once(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", request.param)
    return request.param


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_parts_are_the_whole(logits_at_once: int, dtype: torch.dtype, within: float, sampling: str, way: str) -> None:
    problem = numbers(dtype)
    for got, expected in zip(results(problem, sampling, way), results(problem, sampling, way, plain=True), strict=True):
        assert got.dtype == expected.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=0, atol=within * float(expected.abs().max()))


def test_the_plain_distribution_is_log_softmax() -> None:
    problem = numbers(torch.float64)
    logits = problem["hidden"] @ problem["weight"].t() / 0.7
    logits[:, BANNED] = -torch.inf
    rows = logits.log_softmax(-1)
    scores = score(
        Predictions(problem["hidden"], problem["weight"]),
        problem["row"],
        problem["token"],
        BANNED,
        SamplingParams(temperature=0.7),
        entropy=True,
    )
    torch.testing.assert_close(scores.logprobs, rows[problem["row"], problem["token"]])
    torch.testing.assert_close(scores.entropy, -(rows.exp() * rows.masked_fill(rows.isinf(), 0)).sum(-1))


def test_entropy_is_computed_only_where_asked_for() -> None:
    problem = numbers(torch.float32)
    predictions = Predictions(problem["hidden"], problem["weight"])
    assert score(predictions, problem["row"], problem["token"], BANNED, SamplingParams()).entropy is None


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_banned_token_has_no_gradient_even_where_it_is_asked_for(logits_at_once: int, sampling: str) -> None:
    problem = numbers(torch.float32)
    problem["token"][7] = BANNED[0]
    ours, plain = (results(problem, sampling, "logprobs", plain=way) for way in (False, True))
    for got, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


def test_in_bfloat16_many_parts_are_as_exact_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over the parts is float32: gradients of parts of one position are as near to float64 as those of one part."""
    problem = numbers(torch.bfloat16)
    exact = results({n: t.double() if t.is_floating_point() else t for n, t in problem.items()}, "plain", "both", plain=True)
    errors = {}
    for logits in (2**25, 1):
        monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", logits)
        found = results(problem, "plain", "both")
        assert [t.dtype for t in found] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
        errors[logits] = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True)]
    assert max(errors[2**25]) < 0.02
    for one, many in zip(errors[2**25], errors[1], strict=True):
        assert many < 1.5 * one + 1e-3, errors

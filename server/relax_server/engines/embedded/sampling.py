"""Logits to tokens and logprobs for a whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from relax_server.models.nucleus import kept

NEVER = -9999.0
"""Reported as the logprob of an alternative that cannot be sampled, as the OpenAI API does; JSON has no infinity."""


@dataclass(frozen=True)
class Sampling:
    """How one sequence is sampled."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict)
    top_logprobs: int = 0
    """How many alternatives to report per token."""
    skip_special_tokens: bool = True


@dataclass
class SampledTokens:
    """One new token per row."""

    tokens: list[int]
    logprobs: list[float]
    top: list[list[tuple[float, int]]] | None
    """Per row the most likely (logprob, id), where any row asked for them."""


def uniforms(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """A uniform number in [0, 1) for token `index` of the response with `seed`: SplitMix64 of both (Steele et al. 2014).

    Being a pure function of (seed, index), it does not depend on batching, retraction or retries.

    Args:
        seeds: uint64 [rows]; indices: uint64 [rows].
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds + np.uint64(0x9E3779B97F4A7C15)) ^ (indices + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample(
    logits: torch.Tensor, params: Sequence[Sampling], seeds: np.ndarray, indices: np.ndarray, banned: torch.Tensor
) -> SampledTokens:
    """Sample one token per row.

    The logprob is that of the distribution that is sampled from: softmax((logits + bias) / temperature) with banned ids at
    -inf, cut by top-k and top-p and divided by what is left. At temperature 0 the most likely token is taken, and its logprob
    is that of temperature 1 without a cut.

    Args:
        logits: float32 [rows, vocabulary]; changed.
        params: per row.
        seeds: uint64 [rows]; indices: uint64 [rows], tokens sampled before this one.
        banned: int64 [n], ids that are never sampled.

    Raises:
        ValueError: the logits of a row are not finite.
    """
    device = logits.device
    if len(banned):
        logits.index_fill_(1, banned, -torch.inf)
    for row, p in enumerate(params):
        for token, bias in p.logit_bias.items():
            logits[row, token] += bias
    heat = np.fromiter((p.temperature for p in params), np.float32, len(params))
    greedy = heat == 0
    if not (heat == 1).all():
        logits /= torch.from_numpy(np.where(greedy, np.float32(1), heat)).to(device)[:, None]
    logprobs = logits.log_softmax(-1)
    probs = logprobs.exp()
    cut = [i for i, p in enumerate(params) if not greedy[i] and (p.top_p < 1 or 0 < p.top_k < logits.shape[1])]
    if cut:
        rows = torch.tensor(cut, device=device)
        inside = _kept(probs[rows], [params[i] for i in cut])
        probs[rows] = probs[rows].masked_fill(~inside, 0)
        logprobs[rows] = logprobs[rows].masked_fill(~inside, -torch.inf).log_softmax(-1)
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:]
    if not bool(torch.isfinite(total).all()):
        raise ValueError("the model's logits are not finite (NaN or infinite weights?)")
    u = torch.from_numpy(uniforms(seeds, indices).astype(np.float32)).to(device)[:, None] * total
    u = torch.minimum(
        u, torch.nextafter(total, torch.zeros_like(total))
    )  # rounding must not reach past the last possible token
    tokens = torch.searchsorted(cdf, u, right=True)
    if greedy.any():
        most = torch.from_numpy(greedy).to(device)
        tokens[most, 0] = logits[most].argmax(-1)
    chosen = logprobs.gather(1, tokens)[:, 0]
    return SampledTokens(tokens[:, 0].tolist(), chosen.tolist(), _top(logprobs, params))


def _kept(probs: torch.Tensor, params: Sequence[Sampling]) -> torch.Tensor:
    k = torch.tensor([p.top_k if p.top_k > 0 else probs.shape[1] for p in params], device=probs.device)
    p = torch.tensor([p.top_p for p in params], dtype=probs.dtype, device=probs.device)
    return kept(probs, k[:, None], p[:, None])


def _top(logprobs: torch.Tensor, params: Sequence[Sampling]) -> list[list[tuple[float, int]]] | None:
    most = max(p.top_logprobs for p in params)
    if not most:
        return None
    values, ids = logprobs.clamp(min=NEVER).topk(min(most, logprobs.shape[1]), -1)
    rows = zip(values.tolist(), ids.tolist(), params, strict=True)
    return [list(zip(v, i, strict=True))[: p.top_logprobs] for v, i, p in rows]

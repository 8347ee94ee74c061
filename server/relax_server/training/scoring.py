"""How likely a model finds tokens, computed without all of its logits at once.

The logits of r positions over v tokens would take several float32 tensors [r, v]: 4.9 GB each with 8,192 positions and 150,000
tokens. Here the positions are taken in parts of at most `LOGITS_AT_ONCE` logits. The forward pass keeps one number per trained
token, and one per position where the entropy is asked for; the backward pass computes the logits of each part once more. Where
there is only one part, which is so for small models, its logprobs are kept for the backward pass instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from relax_sdk.config import SamplingParams
from relax_server.training.algorithms.distribution import Distribution, distribution
from relax_server.training.algorithms.vocabulary import VocabularyShard

LOGITS_AT_ONCE = 2**25
"""Logits of one part: 134 MB as float32."""


@dataclass(frozen=True)
class Predictions:
    """What a model predicts at r positions over v tokens; the logits are `hidden @ weight.T`."""

    hidden: Tensor
    """[r, width], the states before the output layer, in the model's dtype."""
    weight: Tensor
    """[v, width], the output layer's, in the model's dtype; of this rank's part of the vocabulary."""
    shard: VocabularyShard | None = None
    """Which part that is; None: all of it."""


@dataclass(frozen=True)
class Scores:
    """Natural logarithms and nats; float32, or float64 for a model in float64."""

    logprobs: Tensor
    """[n]."""
    entropy: Tensor | None
    """[r]; None where it was not asked for."""


def score(
    predictions: Predictions,
    row: Tensor,
    token: Tensor,
    banned: Tensor,
    sampling: SamplingParams,
    *,
    entropy: bool = False,
) -> Scores:
    """Compute log probabilities of n tokens under the distributions they are sampled from, see `algorithms.distribution`.

    Both results have gradients, which reach `hidden` and `weight`. They can be taken once: not gradients of gradients.

    Args:
        predictions: at r positions.
        row: int64 [n], the position that predicts each token; a position may predict several or none.
        token: int64 [n].
        banned: int64 [b], tokens that are never sampled.
        sampling: its `temperature`, above 0, `top_p` and `top_k` are used.
        entropy: whether the entropy of each position is wanted too.
    """
    rule = _Rule(banned, sampling, entropy, predictions.shard)
    logprobs, nats = _InParts.apply(predictions.hidden, predictions.weight, row, token, rule)  # type: ignore[misc]
    return Scores(logprobs, nats)


@dataclass(frozen=True)
class _Rule:
    banned: Tensor
    sampling: SamplingParams
    entropy: bool
    shard: VocabularyShard | None

    def distribution(self, hidden: Tensor, weight: Tensor) -> Distribution:
        return distribution(hidden @ weight.t(), self.banned, self.sampling, self.shard)


@dataclass(frozen=True)
class _Part:
    positions: slice
    tokens: Tensor | slice
    """Those that these positions predict, as indices into the n tokens."""


def _parts(row: Tensor, positions: int, vocabulary: int) -> list[_Part]:
    size = max(1, LOGITS_AT_ONCE // vocabulary)
    if positions <= size:
        return [_Part(slice(0, positions), slice(None))]
    borders = [*range(0, positions, size), positions]
    in_order, order = row.sort(stable=True)
    cuts = torch.searchsorted(in_order, torch.tensor(borders, device=row.device)).tolist()
    pairs = zip(borders[:-1], borders[1:], cuts[:-1], cuts[1:], strict=True)
    return [_Part(slice(a, b), order[first:last]) for a, b, first, last in pairs]


class _InParts(torch.autograd.Function):
    """Logprobs [n] and entropy [r] or None, part by part."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, row: Tensor, token: Tensor, rule: _Rule) -> Any:
        ctx.set_materialize_grads(False)
        ctx.rule, ctx.parts = rule, _parts(row, len(hidden), len(weight))
        kept: tuple[Tensor | None, ...] = (None, None)
        logprobs: list[Tensor] = []
        nats: list[Tensor] = []
        for part in ctx.parts:
            found = rule.distribution(hidden[part.positions], weight)
            logprobs.append(found.of(row[part.tokens] - part.positions.start, token[part.tokens]))
            if rule.entropy:
                nats.append(found.entropy)
            if len(ctx.parts) == 1:
                kept = (found.logprobs, found.cut)
            del found  # before the next part needs as much
        ctx.save_for_backward(hidden, weight, row, token, *kept)
        if len(ctx.parts) == 1:
            return logprobs[0], nats[0] if nats else None
        by_token = torch.empty(len(token), dtype=logprobs[0].dtype, device=hidden.device)
        for part, values in zip(ctx.parts, logprobs, strict=True):
            by_token[part.tokens] = values
        return by_token, torch.cat(nats) if nats else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprob: Tensor | None, by_entropy: Tensor | None) -> Any:  # type: ignore[override]
        hidden, weight, row, token, kept, cut = ctx.saved_tensors
        temperature, shard = ctx.rule.sampling.temperature, ctx.rule.shard
        to_hidden, to_weight = torch.empty_like(hidden), None
        for part in ctx.parts:
            states = hidden[part.positions]
            found = ctx.rule.distribution(states, weight) if kept is None else Distribution(kept, cut, temperature, shard)
            slopes = found.gradient(
                row[part.tokens] - part.positions.start,
                token[part.tokens],
                None if by_logprob is None else by_logprob[part.tokens],
                None if by_entropy is None else by_entropy[part.positions],
            ).to(hidden.dtype)
            del found
            torch.mm(slopes, weight, out=to_hidden[part.positions])
            if ctx.needs_input_grad[1]:  # a frozen output layer has none
                to_weight = slopes.t() @ states if kept is not None else _add_product(to_weight, slopes.t(), states)
            del slopes
        if shard is not None:
            shard.sum(to_hidden)
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), None, None, None


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Add `a @ b` to a sum that is float32 at least, so that many small parts are not rounded away."""
    if total is None:
        return (a @ b).to(torch.promote_types(a.dtype, torch.float32))
    return total.addmm_(a, b) if total.dtype == a.dtype else total.add_(a @ b)

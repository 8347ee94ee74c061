"""From logits to the distribution that tokens are sampled from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from relax_sdk.config import SamplingParams
from relax_server.models.nucleus import kept
from relax_server.training.algorithms.vocabulary import VocabularyShard

NEVER = -1e30
"""The logit of a banned token: its probability is exactly 0, and 0 times it is still a number."""


@dataclass(frozen=True)
class Distribution:
    """Distributions over v tokens at r positions."""

    logprobs: Tensor
    """float32 [r, v]."""
    cut: Tensor | None = None
    """float32 [r, v], log(p / share) of tokens outside top-k and top-p, where the tokens inside have this share of the mass;
    None without a cut."""
    temperature: float = 1.0
    """The logits were divided by it."""
    shard: VocabularyShard | None = None
    """Where the columns above are this rank's part of the vocabulary: which. What follows is of the whole one; there is no
    gradient through it then but by `gradient`."""

    @property
    def entropy(self) -> Tensor:
        """H = -sum over tokens of p log p, in nats, [r]."""
        return -self._sum((self.logprobs.exp() * self.logprobs).sum(-1))

    def _sum(self, values: Tensor) -> Tensor:
        return values if self.shard is None else self.shard.sum(values)

    def _columns(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Columns of tokens, and which of the tokens are here; None: all."""
        return (tokens, None) if self.shard is None else self.shard.local(tokens, self.logprobs.shape[1])

    def of(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """log p of tokens: int64 [n], int64 [n] -> [n].

        A token that was sampled although it is outside the cut, as the weights were others then or as rounding moved the
        border, counts as if it were inside: log p = log(q / (1 + q)), with q its probability relative to the tokens inside.
        """
        columns, mine = self._columns(tokens)
        values = self.logprobs[rows, columns]
        if self.cut is not None:
            outside = self.cut[rows, columns]
            values = torch.where(values > NEVER / 2, values, outside - torch.log1p(outside.exp()))
        return values if mine is None else self._sum(values.where(mine, 0))

    def gradient(self, rows: Tensor, tokens: Tensor, by_logprob: Tensor | None, by_entropy: Tensor | None) -> Tensor:
        """Compute what autograd would, with two tensors [r, v] instead of many: where a sum of results has these gradients, the
        gradient by the logits that `distribution` was given.

        With p the probabilities of a position: that of log p of token t is onehot(t) - p, times 1 / (1 + q) where t is outside
        the cut; that of the entropy H is -p (log p + H); both are divided by the temperature. A banned token has none.

        Args:
            rows, tokens: as given to `of`, [n].
            by_logprob: [n], by the results of `of`; None is 0.
            by_entropy: [r], by the entropy; None is 0.

        Returns:
            [r, v], in the dtype of `logprobs`; of this rank's part of the vocabulary.
        """
        p = self.logprobs.exp()
        slope = torch.zeros(len(p), 1, dtype=p.dtype, device=p.device)
        own, columns = None, tokens
        if by_logprob is not None:
            columns, mine = self._columns(tokens)
            own = by_logprob / self.temperature
            at = self.logprobs[rows, columns]
            if self.cut is not None:
                outside = self.cut[rows, columns]
                own = torch.where(at > NEVER / 2, own, own / (1 + outside.exp()))
                at = torch.maximum(at, outside)
                if mine is not None:
                    own = self._sum(own.where(mine, 0))
            slope[:, 0].index_add_(0, rows, own)
            own = own.masked_fill(at <= NEVER / 2, 0)
            if mine is not None:
                own = own.where(mine, 0)
        if by_entropy is None:
            out = p.mul_(-slope)
        else:
            entropy = -self._sum((p * self.logprobs).sum(-1))[:, None]
            out = p.mul_((self.logprobs + entropy).mul_(-by_entropy[:, None] / self.temperature).sub_(slope))
        return out if own is None else out.index_put_((rows, columns), own, accumulate=True)


def distribution(
    logits: Tensor, banned: Tensor, sampling: SamplingParams, shard: VocabularyShard | None = None
) -> Distribution:
    """log softmax(logits / temperature), without the banned tokens and those that top-k and top-p cut off.

    The cut is made by the same rule as in the engine, from these logits, and has no gradient itself.

    Args:
        logits: [r, v]; results have their dtype, float32 at least.
        banned: int64 [b], tokens that are never sampled.
        sampling: its `temperature`, above 0, `top_p` and `top_k` are used.
        shard: where `logits` are of this rank's part of the vocabulary; every rank of its group makes the same calls. The
            whole rows are brought together only where top-k or top-p cut them.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if shard is not None and is_cut(sampling):
        whole = distribution(shard.join(logits.detach()), banned, sampling)
        assert whole.cut is not None
        return Distribution(shard.part(whole.logprobs), shard.part(whole.cut), sampling.temperature, shard)
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if shard is not None:
        columns, mine = shard.local(banned, logits.shape[1])
        banned = columns[mine]
    if len(banned):
        logits = logits.index_fill(1, banned, NEVER)
    if shard is not None:
        logits = logits - shard.max(logits.amax(-1))[:, None]
        logits -= shard.sum(logits.exp().sum(-1)).log()[:, None]
        return Distribution(logits, temperature=sampling.temperature, shard=shard)
    whole = torch.log_softmax(logits, -1)
    if not is_cut(sampling):
        return Distribution(whole, temperature=sampling.temperature)
    rows, size = whole.shape
    k = torch.full((rows, 1), sampling.top_k if sampling.top_k > 0 else size, device=whole.device)
    inside = kept(whole.detach().exp(), k, torch.full((rows, 1), sampling.top_p, device=whole.device))
    share = torch.logsumexp(whole.masked_fill(~inside, NEVER), -1, keepdim=True)
    return Distribution((whole - share).masked_fill(~inside, NEVER), whole - share, sampling.temperature)


def is_cut(sampling: SamplingParams) -> bool:
    """Whether top-k or top-p cut tokens off."""
    return sampling.top_p < 1 or sampling.top_k > 0

"""Packs samples into forests within a token budget, so that a prefix shared by several samples is computed once.

Samples are sorted by their keys, which brings equal prefixes together; each then adds only the tokens after what it shares
with the one before. The result is a forest in pre-order whose whole attention mask is one integer per token: query q sees
key k iff `k <= q < end[k]`. Prefix sharing of this kind is described in "Prefix Grouper" (arXiv 2506.05433) for one level;
here it is a radix tree of any depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relax_server.models.processor import MediaFeatures
from relax_server.training.batch import MEDIA_SPAN, TokenBatch

LEAST_SAVED = 0.05
"""Share of the tokens that sharing must save, or samples are packed one after the other: many small blocks of attention then
cost more than the tokens are worth (`benchmarks.forest`)."""


@dataclass(frozen=True)
class Share:
    """The tokens of a forest that one of several ranks has."""

    mine: np.ndarray
    """int64 [t], in the whole forest, ascending."""
    order: np.ndarray
    """int64 [tokens of the whole forest], where each is among those of all ranks, one rank after the other."""


@dataclass(frozen=True)
class Forest:
    """Packed samples: t tokens, r rows of logits, n trained tokens."""

    ids: np.ndarray
    """int64 [t]."""
    positions: np.ndarray
    """float32 [3, t]."""
    end: np.ndarray
    """int64 [t], the first token after the subtree of each."""
    rows: np.ndarray
    """int64 [r], ascending: tokens after which a trained token comes."""
    entry: np.ndarray
    """int64 [n], trained tokens as indices into `TokenBatch.trained`."""
    row: np.ndarray
    """int64 [n], the row of logits that predicts each entry, as an index into `rows`."""
    media: tuple[MediaFeatures, ...]
    """Each item of this forest once; an outline before the rank that computes the forest has prepared it."""
    items: np.ndarray
    """int64 [m], which of `TokenBatch.media` they are."""
    media_token: np.ndarray
    """int64 [p], tokens that are placeholders."""
    media_item: np.ndarray
    """int64 [p], index into `media`."""
    media_offset: np.ndarray
    """int64 [p], which of the item's embeddings."""
    routes: np.ndarray | None = None
    """int32 [t, layers, top_k], -1 where the trainer chooses; None without route replay."""
    share: Share | None = None
    """Context parallelism: all of the above but `end` is of this rank's tokens; None: of all."""

    def __len__(self) -> int:
        return len(self.ids)


def pack(batch: TokenBatch, budget: int, share: bool = True, only: Sequence[int] | None = None) -> list[Forest]:
    """Pack samples into forests of at most `budget` tokens; a single longer sample makes a forest of its own.

    Args:
        batch: all samples of the step.
        budget: tokens per forest.
        share: compute a shared prefix once, if that saves enough; without it each sample is a tree of its own.
        only: indices of the samples to pack; None is all.

    Returns:
        Forests whose entries together are every trained token of those samples exactly once.
    """
    order = list(range(len(batch)) if only is None else only)
    if not order:
        return []
    views = [batch.keys[a : a + n] for a, n in zip(batch.start[:-1].tolist(), batch.n_inputs.tolist(), strict=True)]
    plain, lengths = order, batch.n_inputs.tolist()
    if share:
        big = batch.keys.astype(">i8").tobytes()  # bytes in this order compare as the numbers do
        starts = batch.start.tolist()
        order = sorted(order, key=lambda i: big[8 * starts[i] : 8 * (starts[i] + lengths[i])])
    shared = [0] * len(order)
    if share:
        for j in range(1, len(order)):
            shared[j] = _common(views[order[j - 1]], views[order[j]])
        if sum(shared) < LEAST_SAVED * sum(lengths[i] for i in order):
            order, shared = plain, [0] * len(order)
    trained = np.searchsorted(batch.trained.sample, np.arange(len(batch) + 1))
    bins = _bins([lengths[i] for i in order], shared, budget)
    return [_forest(batch, order[a:b], [0, *shared[a + 1 : b]], trained) for a, b in bins]


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def _bins(lengths: Sequence[int], shared: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Ranges of consecutive samples within the budget.

    A range is ended where the sample after it shares least, so that a group stays whole if it can; but not before half of
    the budget is used.
    """
    bins: list[tuple[int, int]] = []
    a = 0
    while a < len(lengths):
        used, b = lengths[a], a + 1
        cut, least = b, -1
        while b < len(lengths):
            if used >= budget / 2 and (least < 0 or shared[b] <= least):
                cut, least = b, shared[b]
            if used + lengths[b] - shared[b] > budget:
                break
            used += lengths[b] - shared[b]
            b += 1
        if b == len(lengths) or least < 0:
            cut = b
        bins.append((a, cut))
        a = cut
    return bins


def _forest(batch: TokenBatch, members: Sequence[int], shared: Sequence[int], trained: np.ndarray) -> Forest:
    """The forest of some samples, in the order given; `shared[j]` tokens of member j are those of member j - 1."""
    starts, n_inputs = batch.start, batch.n_inputs
    total = int(sum(n_inputs[i] - s for i, s in zip(members, shared, strict=True)))
    source = np.empty(total, np.int64)  # packed token -> flat token of the batch
    end = np.empty(total, np.int64)
    path = np.zeros(0, np.int64)
    rows: list[np.ndarray] = []
    entries: list[np.ndarray] = []
    at = 0
    for i, keep in zip(members, shared, strict=True):
        end[path[keep:]] = at
        new = int(n_inputs[i]) - keep
        first = int(starts[i]) + keep
        source[at : at + new] = np.arange(first, first + new)
        path = np.concatenate([path[:keep], np.arange(at, at + new)])
        at += new
        entry = np.arange(trained[i], trained[i + 1])
        entries.append(entry)
        rows.append(path[batch.trained.at[entry] - 1])
    end[path] = at
    kept, row = np.unique(np.concatenate(rows), return_inverse=True)
    keys = batch.keys[source]
    tokens = np.flatnonzero(keys >= batch.vocab_size)
    places = keys[tokens] - batch.vocab_size
    items, item = np.unique(places // MEDIA_SPAN, return_inverse=True)
    return Forest(
        ids=batch.ids[source],
        positions=batch.positions[:, source],
        end=end,
        rows=kept,
        entry=np.concatenate(entries),
        row=row,
        media=tuple(batch.media[i] for i in items),
        items=items,
        media_token=tokens,
        media_item=item,
        media_offset=places % MEDIA_SPAN,
        routes=_routes(batch, source),
    )


def _routes(batch: TokenBatch, source: np.ndarray) -> np.ndarray | None:
    """Routes of packed tokens; a shared token takes those of the sample that brought it in."""
    shapes = [r.shape[1:] for r in batch.routes if r is not None]
    if not shapes:
        return None
    owner = np.searchsorted(batch.start, source, "right") - 1
    out = np.full((len(source), *shapes[0]), -1, np.int32)
    for i in np.unique(owner):
        known = batch.routes[i]
        if known is not None:
            mine = np.flatnonzero((owner == i) & (source - batch.start[i] < len(known)))
            out[mine] = known[source[mine] - batch.start[i]]
    return out

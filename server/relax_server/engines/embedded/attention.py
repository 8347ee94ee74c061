"""Attention over the KV pool for a flattened batch: every row writes its key and value, then reads its own sequence's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from relax_server.engines.embedded.kv_pool import KVPool

NAME = "relax_pool"
"""The attention implementation's name in transformers."""

SINGLE = 256
"""A prompt chunk of this many tokens is attended alone; shorter ones are padded together."""
MASK_ELEMENTS = 2**22
"""Largest padded mask of a bucket of chunks."""


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `start + n` of one sequence in this forward; its first `start` tokens are in the pool already."""

    row: int
    """Row of the slot table."""
    start: int
    n: int


@dataclass
class Bucket:
    """Sequences attended together, padded to the longest."""

    first: int
    """Flat index of the bucket's first token; its tokens are contiguous."""
    n_tokens: int
    slots: torch.Tensor
    """int64 [batch * length], slot 0 where there is no token."""
    batch: int
    length: int
    mask: torch.Tensor | None
    """Added to the scores: [1, batch, 1, length] for single tokens, [1, batch, groups * n, length] for chunks; None: causal."""
    pad: torch.Tensor | None = None
    """Chunks: int64 [batch * n], which of the bucket's tokens stands at each padded place."""
    unpad: torch.Tensor | None = None
    """Chunks: int64 [n_tokens], the padded place of each token."""

    def on(self, device: torch.device) -> Bucket:
        """The same on a device."""
        slots, *others = (None if x is None else x.to(device) for x in (self.slots, self.mask, self.pad, self.unpad))
        assert slots is not None
        return Bucket(self.first, self.n_tokens, slots, self.batch, self.length, *others)


@dataclass
class BatchLayout:
    """Where the tokens of one forward are written and what each of them attends."""

    slots: torch.Tensor
    """int64 [tokens]."""
    buckets: list[Bucket]
    pool: KVPool

    def on(self, device: torch.device) -> BatchLayout:
        """The same on a device; on the CPU, where it is made, this one."""
        if device.type == "cpu":
            return self
        return BatchLayout(self.slots.to(device), [bucket.on(device) for bucket in self.buckets], self.pool)


def order_spans(spans: list[Span]) -> list[int]:
    """The order in which spans are laid out: single tokens first, then chunks; each by length, longest first."""
    return sorted(range(len(spans)), key=lambda i: (spans[i].n > 1, -spans[i].n, -spans[i].start))


def plan(spans: list[Span], table: np.ndarray, pool: KVPool, groups: int) -> BatchLayout:
    """Lay out spans that are in the order of `order_spans`.

    Args:
        spans: of this forward.
        table: int64 [rows, max length], the slot of each token of each sequence, this forward's included.
        groups: query heads per key head.
    """
    starts = np.fromiter((s.start for s in spans), np.int64, len(spans))
    counts = np.fromiter((s.n for s in spans), np.int64, len(spans))
    rows = np.fromiter((s.row for s in spans), np.int64, len(spans))
    singles = int((counts == 1).sum())
    slots = [table[rows[:singles], starts[:singles]]]
    slots += [table[s.row, s.start : s.start + s.n] for s in spans[singles:]]
    buckets, at = [], 0
    ends = starts + counts
    for a, b in _similar(ends[:singles]):
        buckets.append(_single_bucket(at, rows[a:b], ends[a:b], table))
        at += b - a
    for a, b in _chunks(counts, ends, singles, groups):
        n_tokens = int(counts[a:b].sum())
        buckets.append(_chunk_bucket(at, n_tokens, rows[a:b], starts[a:b], counts[a:b], table, groups))
        at += n_tokens
    return BatchLayout(torch.from_numpy(np.concatenate(slots)), buckets, pool).on(pool.device)


def _similar(ends: np.ndarray) -> list[tuple[int, int]]:
    """Cut lengths, longest first, into ranges in which padding wastes little."""
    out, a = [], 0
    while a < len(ends):
        b = int(np.searchsorted(-ends, -(0.7 * ends[a] - 16), side="right"))
        out.append((a, b))
        a = b
    return out


def _chunks(counts: np.ndarray, ends: np.ndarray, first: int, groups: int) -> list[tuple[int, int]]:
    """Cut chunks, longest first, into ranges padded together."""
    out, a = [], first
    while a < len(counts):
        b, longest = a + 1, ends[a]
        while b < len(counts) and counts[a] < SINGLE and counts[b] >= 0.7 * counts[a] - 16:
            longest = max(longest, ends[b])
            low = min(ends[a : b + 1])
            if low < 0.7 * longest - 16 or (b + 1 - a) * counts[a] * longest * groups > MASK_ELEMENTS:
                break
            b += 1
        out.append((a, b))
        a = b
    return out


def _gather_table(rows: np.ndarray, ends: np.ndarray, table: np.ndarray, length: int) -> tuple[torch.Tensor, np.ndarray]:
    inside = np.arange(length) < ends[:, None]
    return torch.from_numpy(np.where(inside, table[rows, :length], 0).reshape(-1)), inside


def _single_bucket(first: int, rows: np.ndarray, ends: np.ndarray, table: np.ndarray) -> Bucket:
    length = int(ends.max())
    slots, inside = _gather_table(rows, ends, table, length)
    mask = None
    if not inside.all():
        mask = torch.from_numpy(np.where(inside, np.float32(0), np.float32(-np.inf))).view(1, len(rows), 1, length)
    return Bucket(first, len(rows), slots, len(rows), length, mask)


def _chunk_bucket(
    first: int, n_tokens: int, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, table: np.ndarray, groups: int
) -> Bucket:
    ends = starts + counts
    length, n = int(ends.max()), int(counts.max())
    slots, _ = _gather_table(rows, ends, table, length)
    if len(rows) == 1 and starts[0] == 0:
        return Bucket(first, n_tokens, slots, 1, length, None)
    seen = np.arange(length) <= (starts[:, None] + np.arange(n))[:, :, None]
    bias = torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf)))
    if len(rows) == 1:
        return Bucket(first, n_tokens, slots, 1, length, bias.view(1, 1, n, length))
    mask = bias[:, None].expand(-1, groups, -1, -1).reshape(1, len(rows), groups * n, length)
    offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
    pad = offsets[:, None] + np.minimum(np.arange(n), counts[:, None] - 1)
    unpad = np.concatenate([i * n + np.arange(c) for i, c in enumerate(counts)])
    return Bucket(first, n_tokens, slots, len(rows), length, mask, torch.from_numpy(pad.reshape(-1)), torch.from_numpy(unpad))


def pool_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    layout: BatchLayout,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls in every layer.

    Args:
        query: [1, heads, tokens, head_dim]; key and value: [1, kv_heads, tokens, head_dim].

    Returns:
        [1, tokens, heads, head_dim], and None for the attention weights.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    layout.pool.keys[layer].index_copy_(1, layout.slots, key[0])
    layout.pool.values[layer].index_copy_(1, layout.slots, value[0])
    heads, tokens, width = query.shape[1:]
    kv_heads = key.shape[1]
    out = torch.empty(tokens, heads, width, dtype=query.dtype, device=query.device)
    grouped = query.view(kv_heads, heads // kv_heads, tokens, width)
    for bucket in layout.buckets:
        shape = (kv_heads, bucket.batch, bucket.length, width)
        k, v = (t.view(shape) for t in layout.pool.gather(layer, bucket.slots))
        q = grouped[:, :, bucket.first : bucket.first + bucket.n_tokens]
        result = _attend(q, k, v, bucket, scaling)
        out[bucket.first : bucket.first + bucket.n_tokens] = result.permute(2, 0, 1, 3).reshape(-1, heads, width)
    return out[None], None


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bucket: Bucket, scaling: float) -> torch.Tensor:
    """One bucket: q [kv_heads, groups, tokens, d], k and v [kv_heads, batch, length, d]; returns the shape of q."""
    kv_heads, groups, _, width = q.shape
    mask = None if bucket.mask is None else bucket.mask.to(q.dtype)
    if bucket.n_tokens == bucket.batch:  # one token a sequence: plain products beat SDPA on tiny rows
        scores = torch.matmul(q.transpose(1, 2) * scaling, k.transpose(2, 3))
        if mask is not None:
            scores += mask
        return torch.matmul(scores.softmax(-1), v).transpose(1, 2)
    if bucket.pad is None:  # one sequence: groups stand where SDPA has heads, sharing keys without a copy
        k, v = k.expand(-1, groups, -1, -1), v.expand(-1, groups, -1, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
    assert bucket.unpad is not None
    q = q.index_select(2, bucket.pad).view(kv_heads, groups, bucket.batch, -1, width).transpose(1, 2)
    out = F.scaled_dot_product_attention(q.reshape(kv_heads, bucket.batch, -1, width), k, v, attn_mask=mask, scale=scaling)
    out = out.view(kv_heads, bucket.batch, groups, -1, width).transpose(1, 2).reshape(kv_heads, groups, -1, width)
    return out.index_select(2, bucket.unpad)


def register() -> None:
    """Make the implementation known to transformers; it needs no mask."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, pool_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None

"""Attention over packed forests.

A forest is a sequence of tokens in pre-order: a prefix shared by several samples appears once, followed by its
continuations. Its whole mask is one integer per token: query q sees key k iff `k <= q < end[k]`, where `end[k]` is the
first token after the subtree of k. `attend` cuts it into dense blocks, or goes by a mask of FlexAttention.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule

from relax_server.training.megatron.flex import FlexMask, attend_flex
from relax_server.training.megatron.micro_batch import MicroBatch

SMALL = 128
"""A subtree of at most this many tokens is one dense block."""
SIBLINGS = 64
"""Neighbouring subtrees are put into one block up to this many tokens, or up to the length of their common past."""


@dataclass(frozen=True)
class Bucket:
    """Blocks of about the same shape, padded to `n` blocks of `q` queries and `k` keys."""

    queries: torch.Tensor
    """int64 [n * q], packed token of each query; padding repeats token 0."""
    keys: torch.Tensor
    """int64 [n * k]."""
    mask: torch.Tensor
    """bool [n, 1, q, k], True where a query sees a key."""
    n: int
    q: int
    k: int


@dataclass(frozen=True)
class BlockPlan:
    """How one forest is cut into blocks."""

    buckets: tuple[Bucket, ...]
    place: torch.Tensor
    """int64 [t], where each packed token's result is in the concatenated results of the buckets."""


def _blocks(end: np.ndarray) -> list[tuple[int, int, np.ndarray]]:
    """Cut a forest into blocks (first query, last query + 1, earlier keys); the queries of a block are its keys as well."""
    blocks: list[tuple[int, int, np.ndarray]] = []
    stack = [(0, len(end), np.zeros(0, np.int64))]  # ranges of whole sibling subtrees, and their ancestors
    while stack:
        start, stop, past = stack.pop()
        limit = max(SIBLINGS, len(past))
        open_at = start
        at = start
        while at < stop:
            after = int(end[at])
            if after - open_at > limit and open_at < at:
                blocks.append((open_at, at, past))
                open_at = at
            if after - at > max(SMALL, limit):
                trunk = at + 1
                while trunk < after and end[trunk] == after:
                    trunk += 1
                blocks.append((at, trunk, past))
                if trunk < after:
                    stack.append((trunk, after, np.concatenate([past, np.arange(at, trunk)])))
                open_at = after
            at = after
        if open_at < stop:
            blocks.append((open_at, stop, past))
    return blocks


def _bucket(end: np.ndarray, blocks: Sequence[tuple[int, int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Padded queries [n, q], keys [n, k] and mask [n, q, k] of blocks."""
    n = len(blocks)
    q = max(stop - start for start, stop, _ in blocks)
    k = max(stop - start + len(past) for start, stop, past in blocks)
    queries, keys = np.zeros((n, q), np.int64), np.zeros((n, k), np.int64)
    n_keys = np.zeros((n, 1, 1), np.int64)
    for i, (start, stop, past) in enumerate(blocks):
        queries[i, : stop - start] = np.arange(start, stop)
        keys[i, : len(past)] = past
        keys[i, len(past) : len(past) + stop - start] = np.arange(start, stop)
        n_keys[i] = len(past) + stop - start
    seen = (keys[:, None, :] <= queries[:, :, None]) & (queries[:, :, None] < end[keys][:, None, :])
    seen &= np.arange(k) < n_keys
    # A padded query sees its first key: a row without keys would be NaN, and stay NaN in the gradient.
    seen[:, :, 0] |= ~seen.any(-1)
    return queries, keys, seen


@functools.lru_cache(maxsize=8)  # a long trunk's mask takes tens of megabytes
def _plan(end_bytes: bytes, device: str) -> BlockPlan:
    end = np.frombuffer(end_bytes, np.int64)
    shapes: dict[tuple[int, int], list[tuple[int, int, np.ndarray]]] = {}
    for block in _blocks(end):
        start, stop, past = block
        shape = ((stop - start - 1).bit_length(), (stop - start + len(past) - 1).bit_length())
        shapes.setdefault(shape, []).append(block)
    buckets, place, offset = [], np.zeros(len(end), np.int64), 0
    for blocks in shapes.values():
        queries, keys, seen = _bucket(end, blocks)
        (n, q), k = queries.shape, keys.shape[1]
        for i, (start, stop, _) in enumerate(blocks):
            place[start:stop] = offset + i * q + np.arange(stop - start)
        offset += n * q
        tensors = (torch.from_numpy(x).to(device) for x in (queries.ravel(), keys.ravel(), seen[:, None]))
        buckets.append(Bucket(*tensors, n=n, q=q, k=k))
    return BlockPlan(tuple(buckets), torch.from_numpy(place).to(device))


def plan(end: torch.Tensor) -> BlockPlan:
    """The blocks of a forest, cached by its contents.

    Args:
        end: int64, any shape with t elements.
    """
    return _plan(end.detach().cpu().numpy().tobytes(), str(end.device))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    end: torch.Tensor,
    scale: float | None,
    flex: FlexMask | None = None,
) -> torch.Tensor:
    """Softmax attention of every token over its ancestors and itself.

    Args:
        query: [t, heads, d].
        key: [t, groups, d]; heads is a multiple of groups (grouped-query attention).
        value: Like key.
        end: int64 with t elements.
        scale: what scores are multiplied with; None is 1 / sqrt(d).
        flex: the mask of `end` for FlexAttention; None attends in dense blocks.

    Returns:
        [t, heads * d].
    """
    if flex is not None:
        return attend_flex(query, key, value, flex, scale)
    _, heads, d = query.shape
    repeat = heads // key.shape[1]
    layout = plan(end)
    results = []
    for bucket in layout.buckets:
        q = query.index_select(0, bucket.queries).view(bucket.n, bucket.q, heads, d).transpose(1, 2)
        k, v = (x.index_select(0, bucket.keys).view(bucket.n, bucket.k, -1, d).transpose(1, 2) for x in (key, value))
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bucket.mask, scale=scale)
        results.append(out.transpose(1, 2).reshape(bucket.n * bucket.q, heads * d))
    return torch.cat(results).index_select(0, layout.place)


class ForestAttention(MegatronModule):
    """Megatron's `core_attention` for one packed forest; the micro-batch carries the mask."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: MicroBatch,
        **_: Any,
    ) -> torch.Tensor:
        """Attend within one forest.

        Args:
            query: [t, 1, heads of this rank, d].
            key: [t, 1, groups of this rank, d].
            value: Like key.
            attention_mask: unused.
            packed_seq_params: the micro-batch.

        Returns:
            [t, 1, heads * d].
        """
        micro = packed_seq_params
        return attend(query[:, 0], key[:, 0], value[:, 0], micro.end, self.scale, micro.flex)[:, None]

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
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from relax_server.training.megatron.flex import FlexMask, attend_flex
from relax_server.training.megatron.micro_batch import Context, MicroBatch

SMALL = 128
"""A subtree of at most this many tokens is one dense block."""
SIBLINGS = 64
"""Neighbouring subtrees are put into one block up to this many tokens, or up to the length of their common past."""


@dataclass(frozen=True)
class Bucket:
    """Blocks of about the same shape, padded to `n` blocks of `q` queries and `k` keys."""

    queries: torch.Tensor
    """int64 [n * q], each query among those of this rank; padding repeats the first."""
    keys: torch.Tensor
    """int64 [n * k], tokens of the whole forest."""
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
    """int64 [queries], where each query's result is in the concatenated results of the buckets."""


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


@dataclass(frozen=True)
class _Block:
    own: slice
    """This rank's queries in it."""
    keys: np.ndarray
    """Tokens that any of them may see."""


def _bucket(end: np.ndarray, blocks: Sequence[_Block], mine: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Padded queries [n, q], keys [n, k] and mask [n, q, k] of blocks."""
    n = len(blocks)
    q = max(block.own.stop - block.own.start for block in blocks)
    k = max(len(block.keys) for block in blocks)
    queries, keys = np.zeros((n, q), np.int64), np.zeros((n, k), np.int64)
    n_keys = np.zeros((n, 1, 1), np.int64)
    for i, block in enumerate(blocks):
        queries[i, : block.own.stop - block.own.start] = np.arange(block.own.start, block.own.stop)
        keys[i, : len(block.keys)] = block.keys
        n_keys[i] = len(block.keys)
    token = mine[queries]
    seen = (keys[:, None, :] <= token[:, :, None]) & (token[:, :, None] < end[keys][:, None, :])
    seen &= np.arange(k) < n_keys
    # A padded query sees its first key: a row without keys would be NaN, and stay NaN in the gradient.
    seen[:, :, 0] |= ~seen.any(-1)
    return queries, keys, seen


@functools.lru_cache(maxsize=8)  # a long trunk's mask takes tens of megabytes
def _plan(end_bytes: bytes, mine_bytes: bytes | None, device: str) -> BlockPlan:
    end = np.frombuffer(end_bytes, np.int64)
    mine = np.arange(len(end)) if mine_bytes is None else np.frombuffer(mine_bytes, np.int64)
    shapes: dict[tuple[int, int], list[_Block]] = {}
    for start, stop, past in _blocks(end):
        first, after = np.searchsorted(mine, (start, stop)).tolist()
        if first < after:
            block = _Block(slice(first, after), np.concatenate([past, np.arange(start, stop)]))
            shapes.setdefault(((after - first - 1).bit_length(), (len(block.keys) - 1).bit_length()), []).append(block)
    buckets, place, offset = [], np.zeros(len(mine), np.int64), 0
    for blocks in shapes.values():
        queries, keys, seen = _bucket(end, blocks, mine)
        (n, q), k = queries.shape, keys.shape[1]
        for i, block in enumerate(blocks):
            place[block.own] = offset + i * q + np.arange(block.own.stop - block.own.start)
        offset += n * q
        tensors = (torch.from_numpy(x).to(device) for x in (queries.ravel(), keys.ravel(), seen[:, None]))
        buckets.append(Bucket(*tensors, n=n, q=q, k=k))
    return BlockPlan(tuple(buckets), torch.from_numpy(place).to(device))


def plan(end: torch.Tensor, mine: torch.Tensor | None = None) -> BlockPlan:
    """The blocks of a forest, cached by its contents.

    Args:
        end: int64, any shape with t elements.
        mine: int64, the tokens that are queries, ascending; None: all.
    """
    queries = None if mine is None else mine.cpu().numpy().tobytes()
    return _plan(end.detach().cpu().numpy().tobytes(), queries, str(end.device))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    end: torch.Tensor,
    scale: float | None,
    mine: torch.Tensor | None = None,
    flex: FlexMask | None = None,
) -> torch.Tensor:
    """Softmax attention of every token over its ancestors and itself.

    Args:
        query: [queries, heads, d].
        key: [t, groups, d]; heads is a multiple of groups (grouped-query attention).
        value: Like key.
        end: int64 with t elements.
        scale: what scores are multiplied with; None is 1 / sqrt(d).
        mine: int64 [queries], the tokens that are queries, ascending; None: all.
        flex: the mask of `end` for FlexAttention, which takes all tokens as queries; None attends in dense blocks.

    Returns:
        [queries, heads * d].
    """
    if flex is not None:
        return attend_flex(query, key, value, flex, scale)
    _, heads, d = query.shape
    repeat = heads // key.shape[1]
    layout = plan(end, mine)
    results = []
    for bucket in layout.buckets:
        q = query.index_select(0, bucket.queries).view(bucket.n, bucket.q, heads, d).transpose(1, 2)
        k, v = (x.index_select(0, bucket.keys).view(bucket.n, bucket.k, -1, d).transpose(1, 2) for x in (key, value))
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bucket.mask, scale=scale)
        results.append(out.transpose(1, 2).reshape(bucket.n * bucket.q, heads * d))
    return torch.cat(results).index_select(0, layout.place)


def in_order(part: torch.Tensor, context: Context) -> torch.Tensor:
    """Keys or values of all ranks of context parallelism, in the order of the forest; backward sums and divides them again.

    Args:
        part: [t, ...], of this rank's tokens.
        context: which these are.
    """
    group = parallel_state.get_context_parallel_group()
    everyone: Any = gather_from_sequence_parallel_region(part.contiguous(), group=group)
    return everyone.index_select(0, context.order)


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
        end, context, flex = packed_seq_params.end, packed_seq_params.context, packed_seq_params.flex
        if context is None:
            return attend(query[:, 0], key[:, 0], value[:, 0], end, self.scale, flex=flex)[:, None]
        keys, values = (in_order(x, context) for x in (key, value))
        return attend(query[:, 0], keys[:, 0], values[:, 0], end, self.scale, context.mine)[:, None]

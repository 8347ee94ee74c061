"""Attention over a packed forest by FlexAttention, whose kernels leave out the blocks in which no query sees a key.

The block mask is computed on the device from one integer per token, and never from a mask [t, t]. On a CPU FlexAttention has no
backward pass, so there forests are computed in dense blocks (`attention`), and this is only compared with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
"""Queries and keys of a block of the mask."""
SHAPES = 256
"""Kernels that may be compiled in one process: one for each padded length, dtype and number of heads."""


@dataclass(frozen=True)
class FlexMask:
    """The mask of one forest, made once and used by all layers."""

    blocks: BlockMask
    """Over `length` queries and keys."""
    length: int
    """Tokens with padding."""


def padded_length(t: int) -> int:
    """Tokens of a forest with padding: a multiple of 128, and one of four lengths between a power of two and the next.

    Every length has a kernel of its own, which takes seconds to compile, so there are to be few. Padding costs little: a
    padded token sees only itself.
    """
    blocks = -(-t // BLOCK)
    step = 1 << max(0, (blocks - 1).bit_length() - 3)
    return -(-blocks // step) * step * BLOCK


def flex_mask(end: Tensor) -> FlexMask:
    """Build the block mask of a forest on its device.

    Before the diagonal a block is seen at all iff a key's subtree goes past the block's first query, and by all of its queries
    iff every key's subtree goes past the last one.

    Args:
        end: int64 [t]; query q sees key k iff `k <= q < end[k]`.
    """
    t = len(end)
    n = padded_length(t)
    end = torch.cat([end, torch.arange(t + 1, n + 1, device=end.device)])
    first = torch.arange(0, n, BLOCK, device=end.device)
    by_block = end.view(-1, BLOCK)
    q, k = first[:, None], first[None]
    seen = (k <= q) & (by_block.amax(1) > q)
    full = seen & (k < q) & (by_block.amin(1) >= q + BLOCK)
    blocks = BlockMask.from_kv_blocks(
        *_listed(seen & ~full), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=_sees(end), seq_lengths=(n, n)
    )
    return FlexMask(blocks, n)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, int32 [1, 1, rows], and which, int32 [1, 1, rows, columns]: the first ones count."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1).int()[None, None], order.int()[None, None]


def _sees(end: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    return sees


def attend_flex(query: Tensor, key: Tensor, value: Tensor, mask: FlexMask, scale: float | None) -> Tensor:
    """Softmax attention of every token over its ancestors and itself.

    On a GPU the kernels are compiled, once for each padded length. On a CPU this is PyTorch's reference, which takes memory
    [heads, t, t] and no gradient.

    Args:
        query: [t, heads, d].
        key: [t, groups, d]; heads is a multiple of groups (grouped-query attention).
        value: Like key.
        mask: of the forest.
        scale: what scores are multiplied with; None is 1 / sqrt(d).

    Returns:
        [t, heads * d].
    """
    t, heads, d = query.shape
    padding = (0, 0, 0, 0, 0, mask.length - t)
    q, k, v = (F.pad(x, padding).transpose(0, 1)[None] for x in (query, key, value))
    kernel = _compiled() if query.is_cuda else flex_attention
    out: Any = kernel(q, k, v, block_mask=mask.blocks, scale=scale, enable_gqa=heads != key.shape[1])
    return out[0].transpose(0, 1)[:t].reshape(t, heads * d)


@functools.lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    """FlexAttention's kernels; past `SHAPES` of them it raises, rather than going on without kernels."""
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, SHAPES)  # type: ignore[attr-defined]
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, SHAPES)  # type: ignore[attr-defined]
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)

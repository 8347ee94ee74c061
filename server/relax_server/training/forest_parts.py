"""Forests for several ranks: padded to a length that can be divided, cut, and dealt out."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from relax_server.training.forest import Forest, Share

STRIPE = 16
"""Consecutive tokens that one rank of context parallelism has: short enough that every rank has early and late ones."""


def padded(forest: Forest, multiple: int) -> Forest:
    """Lengthen a forest to a multiple of some tokens; those added see themselves alone and are seen by none."""
    n = len(forest)
    more = -n % multiple
    if not more:
        return forest
    routes = forest.routes
    if routes is not None:
        routes = np.concatenate([routes, np.full((more, *routes.shape[1:]), -1, routes.dtype)])
    return dataclasses.replace(
        forest,
        ids=np.concatenate([forest.ids, np.zeros(more, np.int64)]),
        positions=np.concatenate([forest.positions, np.zeros((3, more), forest.positions.dtype)], 1),
        end=np.concatenate([forest.end, np.arange(n, n + more) + 1]),
        routes=routes,
    )


def share(forest: Forest, rank: int, size: int) -> Forest:
    """Cut a forest to the tokens of one rank of context parallelism; only its mask stays whole.

    Args:
        forest: a whole one, whose length is a multiple of `size * STRIPE`.
        rank, size: of the group.
    """
    owner = np.arange(len(forest)) // STRIPE % size
    mine = np.flatnonzero(owner == rank)
    everyone = np.concatenate([np.flatnonzero(owner == r) for r in range(size)])
    local = np.full(len(forest), -1)
    local[mine] = np.arange(len(mine))
    rows = local[forest.rows]
    place = np.cumsum(rows >= 0) - 1  # of each row among those that stay
    entries = rows[forest.row] >= 0
    media = local[forest.media_token]
    return dataclasses.replace(
        forest,
        ids=forest.ids[mine],
        positions=forest.positions[:, mine],
        rows=rows[rows >= 0],
        entry=forest.entry[entries],
        row=place[forest.row[entries]],
        media_token=media[media >= 0],
        media_item=forest.media_item[media >= 0],
        media_offset=forest.media_offset[media >= 0],
        routes=None if forest.routes is None else forest.routes[mine],
        share=Share(mine, np.argsort(everyone)),
    )


def nothing() -> Forest:
    """A forest of one token that teaches nothing: for a rank that must compute one, as others wait for its part."""
    none = np.zeros(0, np.int64)
    return Forest(
        ids=np.zeros(1, np.int64),
        positions=np.zeros((3, 1), np.float32),
        end=np.ones(1, np.int64),
        rows=np.zeros(1, np.int64),
        entry=none,
        row=none,
        media=(),
        items=none,
        media_token=none,
        media_item=none,
        media_offset=none,
    )


def cost(forest: Forest, width: int) -> float:
    """What computing a forest takes, in tokens of a decoder without attention.

    A layer takes about 24 width^2 operations a token and 4 width a pair of tokens that see each other.

    Args:
        forest: a whole one.
        width: of the hidden states.
    """
    pairs = float((forest.end - np.arange(len(forest))).sum())
    return len(forest) + pairs / (6 * width)


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Divide forests over ranks so that the most loaded one has little more than the others: the dearest first, each to the
    rank that has least.

    Returns:
        Indices of the forests of each rank, ascending.
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    out: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        out[rank].append(i)
        heapq.heappush(loads, (load + costs[i], rank))
    return [sorted(own) for own in out]

"""What the placeholder of a media item stands for: tokens, rows of its embeddings and positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from relax_server.models.media_item import MediaFeatures


@dataclass(frozen=True)
class Placed:
    """One media item in a sequence of n tokens, text that belongs to it included."""

    ids: np.ndarray
    """int64 [n]."""
    rows: np.ndarray
    """int64 [n], row of the item's embeddings; -1: text."""
    positions: np.ndarray
    """float32 [3, n], counted from where the item begins."""
    after: float
    """Position of the next token, counted alike."""

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def inside(self) -> np.ndarray:
        """int64, indices of the tokens that are placeholders, ascending."""
        return np.flatnonzero(self.rows >= 0)

    @cached_property
    def order(self) -> np.ndarray:
        """int64, rows of the embeddings in the order of the placeholders."""
        return self.rows[self.inside]


@dataclass(frozen=True)
class MediaTokens:
    """Ids of the tokens that media are made of."""

    placeholders: dict[str, int]
    """By kind."""
    vision: tuple[int, int]
    """Before and after an image or a video."""
    audio: tuple[int, int]
    """Before and after a sound; both -1 where a model has none."""
    encode: Callable[[str], Sequence[int]]
    """Ids of a text."""


PlaceRule = Callable[[MediaFeatures, Any, MediaTokens], Placed]
"""From an item, the model's configuration and its tokens."""


def grid_block(item: MediaFeatures, merge: int, times: np.ndarray) -> np.ndarray:
    """Positions of an image's or a video's tokens.

    Args:
        item: with a grid.
        merge: patches along each side that are one token.
        times: float32 [frames], the first coordinate of each.

    Returns:
        float32 [3, n]: time, height, width.
    """
    assert item.grid is not None
    t, h, w = item.grid[0], item.grid[1] // merge, item.grid[2] // merge
    block = np.indices((t, h, w), dtype=np.float32).reshape(3, -1)
    block[0] = np.repeat(times.astype(np.float32), h * w)
    return block


def run(id: int, positions: np.ndarray, after: float | None = None) -> Placed:
    """An item whose tokens are its placeholders, one after the other.

    Args:
        id: of the placeholder.
        positions: float32 [3, n].
        after: position of the next token; None: after the largest coordinate.
    """
    n = positions.shape[1]
    ids = np.full(n, id, np.int64)
    return Placed(ids, np.arange(n), positions, float(positions.max()) + 1 if after is None else after)


def steps(n: int) -> np.ndarray:
    """Positions of n tokens that are counted as text, float32 [3, n]."""
    return np.broadcast_to(np.arange(n, dtype=np.float32), (3, n))

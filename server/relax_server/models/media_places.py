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


def heard_film(
    item: MediaFeatures,
    tokens: MediaTokens,
    positions: np.ndarray,
    order: np.ndarray,
    ends: tuple[float, float],
    after: float,
) -> Placed:
    """A film whose sound is between its frames, with the brackets of a sound around both.

    Args:
        item: with its sound.
        tokens: of the model.
        positions: float32 [3, n], those of the film's tokens and then of its sound's.
        order: int64 [n], which of them is each token.
        ends: positions of the brackets.
        after: position of the next token.
    """
    ids = np.full(item.n_tokens, tokens.placeholders["audio"], np.int64)
    ids[: item.n_visual] = tokens.placeholders["video"]
    first, last = (np.full((3, 1), end, np.float32) for end in ends)
    return Placed(
        ids=np.concatenate([[tokens.audio[0]], ids[order], [tokens.audio[1]]]),
        rows=np.concatenate([[-1], order, [-1]]),
        positions=np.concatenate([first, positions[:, order], last], 1),
        after=after,
    )


def collapse_heard(ids: Sequence[int], tokens: MediaTokens) -> list[int]:
    """Make one placeholder of each film that is heard: of all between the bracket around it and the one that closes it."""
    start, end = tokens.vision
    out: list[int] = []
    at = 0
    while at < len(ids):
        out.append(ids[at])
        at += 1
        if out[-1] == start and at < len(ids) and ids[at] == tokens.audio[0]:
            close = next((i for i in range(at, len(ids) - 1) if ids[i] == tokens.audio[1] and ids[i + 1] == end), None)
            if close is not None:
                out.append(tokens.placeholders["video"])
                at = close + 1
    return out

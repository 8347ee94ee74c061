"""`colour-v0`: see a coloured square and name its colour."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from relax_envs.choice import LETTERS, ChoiceEnv
from relax_envs.rows import GeneratedRows, splits
from relax_sdk.media import Image

COLOURS = ((220, 40, 40), (40, 200, 60), (50, 70, 220), (220, 210, 50))
"""Red, green, blue and yellow, for A to D."""
SIZE = 64
"""Height and width in pixels."""


def make_picture(label: int, rng: np.random.Generator) -> Image:
    """A square of `COLOURS[label]`, its brightness, size and place varying, on a dark ground of any colour; noise of sd 10."""
    pixels = np.tile(rng.integers(0, 256, 3) * 0.5, (SIZE, SIZE, 1))
    side = int(rng.integers(28, 50))
    top, left = rng.integers(0, SIZE - side, 2)
    pixels[top : top + side, left : left + side] = np.array(COLOURS[label]) * rng.uniform(0.7, 1.1)
    pixels += rng.normal(0, 10, pixels.shape)
    return Image.from_array(np.clip(pixels, 0, 255).astype(np.uint8))


def make_row(label: int, rng: np.random.Generator) -> dict[str, Any]:
    """`{"image": Image, "answer": "A" … "D"}`."""
    return {"image": make_picture(label, rng), "answer": LETTERS[label]}


def tasks() -> dict[str, GeneratedRows]:
    """Rows by split; see `make_row`."""
    return splits(make_row, len(COLOURS), "colour")


class ColourEnv(ChoiceEnv):
    """Name the colour of a square: A red, B green, C blue or D yellow. Chance is 1/4."""

    modalities: ClassVar[set[str]] = {"image"}
    modality = "image"
    question = "which colour?"
    choices = len(COLOURS)
    tasks = staticmethod(tasks)

"""`motion-v0`: watch a square drift and say where to; `motion-shuffled-v0`: the same clips without their order, a control."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from relax_envs.choice import LETTERS, ChoiceEnv
from relax_envs.rows import GeneratedRows, splits
from relax_sdk.media import Video

DIRECTIONS = (-1, 1)
"""Left and right, for A and B."""
FRAMES, SIZE, FPS = 8, 64, 4.0
"""Frames of a clip; height and width in pixels; frames per second."""


def make_frames(label: int, rng: np.random.Generator) -> np.ndarray:
    """A bright square that drifts 2 to 5 pixels a frame on a dark ground with noise of sd 8.

    It starts anywhere and comes in again on the other side (a torus). Any one frame is therefore as likely in either
    direction, and so is any *set* of frames: run backwards, a clip of one direction is one of the other.

    Returns:
        uint8 [8, 64, 64, 3].
    """
    clip = np.tile(rng.integers(0, 90, 3).astype(np.float64), (FRAMES, SIZE, SIZE, 1))
    side, speed = int(rng.integers(14, 22)), int(rng.integers(2, 6))
    top, start = int(rng.integers(0, SIZE - side)), int(rng.integers(0, SIZE))
    colour = rng.integers(140, 256, 3)
    for t in range(FRAMES):
        columns = (start + DIRECTIONS[label] * speed * t + np.arange(side)) % SIZE
        clip[t, top : top + side, columns] = colour
    clip += rng.normal(0, 8, clip.shape)
    return np.clip(clip, 0, 255).astype(np.uint8)


def make_clip(label: int, rng: np.random.Generator) -> Video:
    """The frames of `make_frames`, encoded."""
    return Video.from_array(make_frames(label, rng), fps=FPS)


def make_row(label: int, rng: np.random.Generator) -> dict[str, Any]:
    """`{"video": Video, "answer": "A" or "B"}`."""
    return {"video": make_clip(label, rng), "answer": LETTERS[label]}


def make_shuffled_row(label: int, rng: np.random.Generator) -> dict[str, Any]:
    """The clip of `make_row` with its frames in random order, and the same answer."""
    frames = make_frames(label, rng)
    return {"video": Video.from_array(frames[rng.permutation(FRAMES)], fps=FPS), "answer": LETTERS[label]}


def tasks() -> dict[str, GeneratedRows]:
    """Rows by split; see `make_row`."""
    return splits(make_row, len(DIRECTIONS), "motion")


def shuffled_tasks() -> dict[str, GeneratedRows]:
    """The same clips as `tasks`, frames shuffled."""
    return splits(make_shuffled_row, len(DIRECTIONS), "motion")


class MotionEnv(ChoiceEnv):
    """Say which way a square moves: A left, B right. Chance is 1/2."""

    modalities: ClassVar[set[str]] = {"video"}
    modality = "video"
    question = "left or right?"
    choices = len(DIRECTIONS)
    tasks = staticmethod(tasks)


class MotionShuffledEnv(MotionEnv):
    """The control of `MotionEnv`: without the frames' order nothing can be known, and the reward must stay at 1/2."""

    tasks = staticmethod(shuffled_tasks)

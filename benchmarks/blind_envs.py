"""Environments whose policy cannot, or need not, look or listen: each has a fault as a beginner would make it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from relax_envs.colour import ColourEnv
from relax_envs.colour import tasks as colour_tasks
from relax_envs.motion import MotionEnv
from relax_envs.tone import ToneEnv

import relax_sdk as relax
from relax_sdk.decoding import decode_audio


class DroppedVideo(MotionEnv):
    """The film is made and never passed on."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        (_, question), info = super().reset(seed=seed, options=options)  # type: ignore[misc]
        return question, info


class BlankedAudio(ToneEnv):
    """The wave is cast to integers before it is scaled, so that all of it is 0."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        (sound, question), info = super().reset(seed=seed, options=options)  # type: ignore[misc]
        wave = (decode_audio(sound.bytes()).astype(np.int16) / 32768).astype(np.float32)
        return [relax.Audio.from_array(wave), question], info


class LeakedAnswer(ColourEnv):
    """The question names the file of the picture, and the file is named after the class."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        (picture, question), info = super().reset(seed=seed, options=options)  # type: ignore[misc]
        return [picture, f"{question} {self._answer}.png"], info


class OtherPictures(Sequence[dict[str, Any]]):
    """Rows whose pictures are those of the rows after them.

    Args:
        rows: the right ones.
    """

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index] | {"image": self._rows[(index + 1) % len(self._rows)]["image"]}


class SwappedImages(ColourEnv):
    """Pictures and answers come from two lists, and one of them begins a row later."""

    @staticmethod
    def tasks() -> Any:
        return {split: OtherPictures(rows) for split, rows in colour_tasks().items()}


class NumberedColour(ColourEnv):
    """The question has a number that says nothing of the answer. Nothing is wrong here."""

    modalities: ClassVar[set[str]] = {"image"}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        (picture, question), info = super().reset(seed=seed, options=options)  # type: ignore[misc]
        return [picture, f"{question} {self.np_random.integers(10, 100)}"], info

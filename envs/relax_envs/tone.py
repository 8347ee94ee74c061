"""`tone-v0`: hear one second of a tone and name its pitch."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from relax_envs.choice import LETTERS, ChoiceEnv
from relax_envs.rows import GeneratedRows, splits
from relax_sdk.media import SAMPLING_RATE, Audio

TONES = (300.0, 600.0, 1200.0, 2400.0)
"""Hz, for A to D."""


def make_tone(label: int, rng: np.random.Generator) -> Audio:
    """One second at 16 kHz: pitch within 3 % of `TONES[label]`, amplitude 0.1 to 0.6, random phase, noise of sd 0.02."""
    seconds = np.arange(SAMPLING_RATE) / SAMPLING_RATE
    pitch = TONES[label] * rng.uniform(0.97, 1.03)
    wave = rng.uniform(0.1, 0.6) * np.sin(2 * np.pi * (pitch * seconds + rng.uniform()))
    return Audio.from_array((wave + rng.normal(0, 0.02, SAMPLING_RATE)).astype(np.float32))


def make_row(label: int, rng: np.random.Generator) -> dict[str, Any]:
    """`{"audio": Audio, "answer": "A" … "D"}`."""
    return {"audio": make_tone(label, rng), "answer": LETTERS[label]}


def tasks() -> dict[str, GeneratedRows]:
    """Rows by split; see `make_row`."""
    return splits(make_row, len(TONES), "tone")


class ToneEnv(ChoiceEnv):
    """Name the pitch of a tone: A 300, B 600, C 1200 or D 2400 Hz. Chance is 1/4."""

    modalities: ClassVar[set[str]] = {"audio"}
    modality = "audio"
    question = "which tone?"
    choices = len(TONES)
    tasks = staticmethod(tasks)

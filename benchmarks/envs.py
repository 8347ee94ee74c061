"""Environments of the benchmarks, as small as can be, and the media that they show."""

from __future__ import annotations

import asyncio
import functools
import io
import os
import struct
import time
import zlib
from typing import Any

import numpy as np

import relax_sdk as relax
from relax_sdk import Audio, Image
from relax_sdk.env import ResetResult, StepResult
from relax_sdk.messages import AssistantMessage

ENDLESS = 10**9
"""Turns of an episode that does not end by itself."""
PIXELS, SECONDS, SAMPLING_RATE = 592, 30, 16_000
"""A picture of noise so large has 1 MB as PNG; a sound so long, 0.96 MB as 16-bit WAV."""


class Echo(relax.Env):
    """Text, `turns` turns, plain methods that are quick."""

    blocking = False

    def __init__(self, turns: int = 1) -> None:
        self.turns, self.turn = turns, 0

    def reset(self, *, seed=None, options=None):  # type: ignore[override]
        super().reset(seed=seed)
        return f"question {options['task']['index']}: which letter?", {}  # type: ignore[index]

    def step(self, action):  # type: ignore[override]
        self.turn += 1
        over = self.turn == self.turns
        return None if over else f"wrong, try again ({self.turn})", float(action.text == "A"), over, False, {}


class EchoInThreads(Echo):
    """The same, called in threads."""

    blocking = True


class EchoAsync(Echo):
    """The same with coroutines."""

    async def reset(self, *, seed=None, options=None):  # type: ignore[override]
        return super().reset(seed=seed, options=options)

    async def step(self, action):  # type: ignore[override]
        return super().step(action)


class Eater(relax.Env):
    """Takes without end what its task names: `memory`, `processes`, or a `processor`."""

    def reset(self, *, seed=None, options=None):  # type: ignore[override]
        super().reset(seed=seed)
        self.what = options["task"]["what"]  # type: ignore[index]
        return "what next?", {}

    def step(self, action):  # type: ignore[override]
        taken = []
        while True:
            if self.what == "memory":
                taken.append(b"a" * (16 << 20))
            elif self.what == "processes" and os.fork() == 0:
                time.sleep(60)


class Waits(Echo):
    """Each step waits, as one does for a tool, and holds no thread meanwhile."""

    def __init__(self, turns: int = 1, seconds: float = 1.0) -> None:
        super().__init__(turns)
        self.seconds = seconds

    async def step(self, action: AssistantMessage) -> StepResult:
        await asyncio.sleep(self.seconds)
        return super().step(action)


class Shows(relax.Env):
    """Each turn shows a picture of 1 MB and a sound of 30 s.

    Args:
        turns: of an episode.
        own: each episode has media of its own; otherwise those of a turn are the same in all.
    """

    modalities = {"image", "audio"}
    blocking = False

    def __init__(self, turns: int, own: bool) -> None:
        self.turns, self.own, self.turn, self.first = turns, own, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        self.first = seed or 0 if self.own else 0
        return self.show(), {}

    def step(self, action: AssistantMessage) -> StepResult:
        self.turn += 1
        over = self.turn == self.turns
        return None if over else self.show(), 0.0, over, False, {}

    def show(self) -> list[Any]:
        name = f"{self.first}/{self.turn}"
        return ["what is this?", Image.from_bytes(picture(name)), Audio.from_bytes(sound(name))]


@functools.cache
def _noise() -> tuple[bytes, bytes]:
    """A picture and a sound."""
    from PIL import Image as PILImage

    rng = np.random.default_rng(0)
    buffer = io.BytesIO()
    PILImage.fromarray(rng.integers(0, 255, (PIXELS, PIXELS, 3), np.uint8)).save(buffer, format="PNG", compress_level=1)
    wave = Audio.from_array(rng.uniform(-0.5, 0.5, SECONDS * SAMPLING_RATE), SAMPLING_RATE).bytes()
    return buffer.getvalue(), wave


def picture(name: str) -> bytes:
    """A PNG of 1 MB; another name, other bytes. Only the comment in front of the end differs, so that it costs nothing."""
    png, comment = _noise()[0], b"tEXt" + b"Comment\0" + name.encode()
    chunk = struct.pack(">I", len(comment) - 4) + comment + struct.pack(">I", zlib.crc32(comment))
    return png[:-12] + chunk + png[-12:]


def sound(name: str) -> bytes:
    """A WAV of 30 s; another name, other bytes. Only its last two samples differ."""
    return _noise()[1][:-4] + struct.pack("<I", zlib.crc32(name.encode()))

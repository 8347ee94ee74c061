"""Media files made on the spot: whole, cut short and wrong ones."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile


def wave(seconds: float = 1.0, rate: int = 16_000) -> np.ndarray:
    """A tone with noise, float32 [n]."""
    n = int(seconds * rate)
    noise = np.random.default_rng(0).normal(0, 0.02, n)
    return (0.3 * np.sin(2 * np.pi * 440 * np.arange(n) / rate) + noise).astype(np.float32)


def sound_file(format: str, subtype: str | None = None, rate: int = 16_000, samples: np.ndarray | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, wave(rate=rate) if samples is None else samples, rate, format=format, subtype=subtype)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def encode_sound() -> Callable[..., bytes]:
    return sound_file


@pytest.fixture(scope="session")
def encode_video(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bytes]:
    """`encode_video(container, codec, frames, fps, options, audio)`; frames uint8 [n, h, w, 3] or None for no video stream."""

    def encode(
        container: str = "mp4",
        codec: str = "libx264",
        frames: np.ndarray | None = None,
        fps: int = 8,
        options: dict[str, str] | None = None,
        audio: bool = False,
    ) -> bytes:
        path: Path = tmp_path_factory.mktemp("video") / f"clip.{container}"
        with av.open(str(path), "w", format=container, options=options or {}) as out:
            video: Any = out.add_stream(codec, rate=fps) if frames is not None else None
            sound: Any = out.add_stream("aac", rate=16_000) if audio else None
            if frames is not None:
                video.height, video.width, video.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
                for pixels in frames:
                    out.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
                out.mux(video.encode())
            if audio:
                samples = av.AudioFrame.from_ndarray(wave()[None, :], format="fltp", layout="mono")
                samples.sample_rate = 16_000
                out.mux(sound.encode(samples))
                out.mux(sound.encode())
        return path.read_bytes()

    return encode


@pytest.fixture(scope="session")
def noise_frames() -> np.ndarray:
    """40 frames of noise, which do not compress: cutting the file cuts frames."""
    return np.random.default_rng(0).integers(0, 255, (40, 64, 64, 3), dtype=np.uint8)

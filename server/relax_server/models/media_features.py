"""Media bytes to the tensors a Qwen3-Omni tower takes, without torchvision: patches and log-mel frames."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from relax_sdk.errors import MediaError
from relax_sdk.media import SAMPLING_RATE, decode_audio, decode_image, decode_video

Kind = Literal["image", "audio", "video"]

MIN_SAMPLES = SAMPLING_RATE // 10
"""Shorter sounds are padded with silence to 0.1 s, the shortest the mel filter takes."""


@dataclass(frozen=True)
class MediaFeatures:
    """One media item as its tower sees it."""

    kind: Kind
    tensor: np.ndarray
    """float32; image and video: [n_patches, 3 * temporal * patch * patch]; audio: [n_mels, n_frames]."""
    n_tokens: int
    """Placeholders after expansion."""
    grid: tuple[int, int, int] | None = None
    """Patches (time, height, width) before the spatial merge; image and video."""
    second_per_grid: float | None = None
    """Seconds that one temporal patch spans; video."""


@dataclass(frozen=True)
class FeatureConfig:
    """Sizes and statistics; from the model folder's `preprocessor_config.json`."""

    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    patch: int
    temporal: int
    merge: int
    mels: int
    max_frames: int

    @classmethod
    def load(cls, folder: Path) -> FeatureConfig:
        """Read a model folder; missing fields take Qwen3-Omni's published values."""
        import json

        file = folder / "preprocessor_config.json"
        raw: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        size = raw.get("size") or {}
        return cls(
            min_pixels=size.get("shortest_edge", raw.get("min_pixels", 3136)),
            max_pixels=size.get("longest_edge", raw.get("max_pixels", 12_845_056)),
            mean=tuple(raw.get("image_mean", (0.5, 0.5, 0.5))),
            std=tuple(raw.get("image_std", (0.5, 0.5, 0.5))),
            patch=raw.get("patch_size", 16),
            temporal=raw.get("temporal_patch_size", 2),
            merge=raw.get("merge_size", 2),
            mels=raw.get("feature_size", 128),
            max_frames=raw.get("max_video_frames", 64),
        )


class FeatureExtractor:
    """Decodes and prepares media; safe to call from several threads."""

    def __init__(self, config: FeatureConfig) -> None:
        from transformers import WhisperFeatureExtractor

        self.config = config
        self._mel: Any = WhisperFeatureExtractor(feature_size=config.mels, sampling_rate=SAMPLING_RATE)

    def __call__(self, data: bytes, kind: Kind) -> MediaFeatures:
        """Features of one item.

        Raises:
            MediaError: damaged, empty, not finite.
        """
        if kind == "audio":
            return self._audio(decode_audio(data))
        if kind == "image":
            return self._visual(decode_image(data)[None], "image", None)
        if kind == "video":
            frames, fps = decode_video(data, self.config.max_frames)
            return self._visual(frames, "video", self.config.temporal / fps)
        raise MediaError(f"unknown media kind {kind!r}")

    def _audio(self, wave: np.ndarray) -> MediaFeatures:
        wave = np.pad(wave, (0, max(0, MIN_SAMPLES - len(wave))))
        out = self._mel(wave, sampling_rate=SAMPLING_RATE, padding=False, truncation=False, return_tensors="np")
        tensor = np.ascontiguousarray(out["input_features"][0], dtype=np.float32)
        return MediaFeatures("audio", tensor, audio_tokens(tensor.shape[1]))

    def _visual(self, frames: np.ndarray, kind: Kind, second_per_grid: float | None) -> MediaFeatures:
        c = self.config
        height, width = fit_size(frames.shape[1], frames.shape[2], c.patch * c.merge, c.min_pixels, c.max_pixels)
        if (height, width) != frames.shape[1:3]:
            frames = _resize(frames, height, width)
        pixels = (frames.astype(np.float32) / 255 - np.asarray(c.mean, np.float32)) / np.asarray(c.std, np.float32)
        tensor, grid = patchify(pixels, c.patch, c.merge, c.temporal)
        return MediaFeatures(kind, tensor, math.prod(grid) // c.merge**2, grid, second_per_grid)


def audio_tokens(n_frames: int) -> int:
    """Tokens of `n_frames` mel frames: 13 per 100, as Qwen3-Omni's convolutions leave them."""
    rest = n_frames % 100
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + n_frames // 100 * 13


def fit_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The nearest size whose sides are multiples of `factor` and whose area is within bounds, at nearly the same shape.

    The rule of Qwen2-VL's image processor.

    Raises:
        MediaError: one side is over 200 times the other.
    """
    if max(height, width) > 200 * min(height, width):
        raise MediaError(f"{width}x{height} pixels: the longer side may be at most 200 times the shorter")
    h, w = (max(factor, round(side / factor) * factor) for side in (height, width))
    if h * w > max_pixels:
        beta = math.sqrt(height * width / max_pixels)
        h, w = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
    elif h * w < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        h, w = (math.ceil(side * beta / factor) * factor for side in (height, width))
    return h, w


def _resize(frames: np.ndarray, height: int, width: int) -> np.ndarray:
    from PIL import Image

    size = (width, height)
    return np.stack([np.asarray(Image.fromarray(f).resize(size, Image.Resampling.BICUBIC)) for f in frames])


def patchify(pixels: np.ndarray, patch: int, merge: int, temporal: int) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Cut frames into patches in the order Qwen's towers expect; the last frame is repeated to fill a temporal patch.

    Args:
        pixels: float32 [n_frames, height, width, 3]; sides are multiples of `patch * merge`.

    Returns:
        float32 [n_patches, 3 * temporal * patch * patch], and the grid (time, height, width) in patches.
    """
    missing = -len(pixels) % temporal
    if missing:
        pixels = np.concatenate([pixels, np.repeat(pixels[-1:], missing, 0)])
    v = pixels.transpose(0, 3, 1, 2)
    frames, channels, height, width = v.shape
    t, h, w = frames // temporal, height // patch, width // patch
    v = v.reshape(t, temporal, channels, h // merge, merge, patch, w // merge, merge, patch)
    v = v.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return np.ascontiguousarray(v.reshape(t * h * w, channels * temporal * patch * patch)), (t, h, w)

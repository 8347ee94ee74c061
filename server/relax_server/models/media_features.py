"""Media bytes to the tensors that a model's towers take, as the model folder's own processor would prepare them.

Where that processor needs torchvision, this calls what torchvision calls: `torch.nn.functional.interpolate` on 8-bit pixels.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from relax_sdk.errors import ConfigError, MediaError
from relax_sdk.measuring import film_size, sound_length
from relax_sdk.media import MediaRef, decode_audio, decode_image, decode_video
from relax_server.models.processor_config import RESAMPLE, PatchSettings, ProcessorConfig

if TYPE_CHECKING:
    from relax_server.models.families.base import MediaRule

Kind = Literal["image", "audio", "video"]
NO_TENSOR = np.empty((0,), np.float32)


@dataclass(frozen=True)
class MediaFeatures:
    """One media item as its tower sees it."""

    kind: Kind
    tensor: np.ndarray
    """float32; image and video: [n_patches, 3 * temporal * patch * patch]; audio: [n_mels, n_frames]; `NO_TENSOR` in an
    outline."""
    n_tokens: int
    """Placeholders after expansion, those of its sound included."""
    grid: tuple[int, int, int] | None = None
    """Patches (time, height, width) before the spatial merge; image and video."""
    second_per_grid: float | None = None
    """Seconds that one temporal patch spans; video."""
    times: tuple[float, ...] | None = None
    """Seconds at which each temporal patch is shown, where the model is told them; video."""
    sound: MediaFeatures | None = None
    """What is heard with a film, interleaved by time; its embeddings are after those of the pictures."""

    @property
    def n_visual(self) -> int:
        """Placeholders that are seen, not heard."""
        return 0 if self.grid is None else self.n_tokens - (0 if self.sound is None else self.sound.n_tokens)

    @property
    def heard(self) -> MediaFeatures | None:
        """What the audio tower takes: the sound itself, or that of a film; None: nothing."""
        return self if self.grid is None else self.sound


class FeatureExtractor:
    """Decodes and prepares media; safe to call from several threads.

    Args:
        config: of the model folder.
        rule: of the model's family.

    Raises:
        ConfigError: the family takes text only.
    """

    def __init__(self, config: ProcessorConfig, rule: MediaRule | None) -> None:
        if rule is None:
            raise ConfigError("the model takes text only, so it has no media to prepare")
        self.config, self.rule = config, rule

    @cached_property
    def _mel(self) -> Any:
        from transformers import WhisperFeatureExtractor  # takes seconds, which only sounds need

        return WhisperFeatureExtractor(**asdict(self.config.audio))

    def __call__(self, data: bytes, kind: Kind) -> MediaFeatures:
        """Features of one item.

        Raises:
            MediaError: damaged, empty, not finite, or not of a shape that the model's processor takes.
        """
        if kind == "audio" and self.rule.audio is not None:
            return self._audio(decode_audio(data, self.config.audio.sampling_rate))
        if kind == "image":
            return _visual(decode_image(data)[None], "image", self.config.image, self.config.image.max_pixels, None)
        if kind == "video":
            return self._video(data)
        raise MediaError(f"the model does not take {kind}")

    def outline(self, data: bytes, ref: MediaRef) -> MediaFeatures:
        """The features of one item without their tensor; what it decodes of the item it does not hold.

        Raises:
            MediaError: damaged, empty, or not of a shape that the model's processor takes.
        """
        if ref.kind == "audio":
            settings = self.config.audio
            length = max(sound_length(data, settings.sampling_rate), settings.min_samples)
            return MediaFeatures("audio", NO_TENSOR, self._count(length // settings.hop_length))
        if ref.kind == "image" and ref.width and ref.height:
            settings = self.config.image
            size = settled_size("image", ref.height, ref.width, settings, settings.max_pixels)
            return _outlined("image", 1, *size, settings, None)
        if ref.kind == "video":
            n, height, width, fps = film_size(data, self.config.sampling)
            settings = self.config.video
            size = settled_size("video", height, width, settings, self.most_pixels(n))
            return _outlined("video", n, *size, settings, settings.temporal / fps)
        return replace(self(data, ref.kind), tensor=NO_TENSOR)

    def _audio(self, wave: np.ndarray) -> MediaFeatures:
        settings = self.config.audio
        wave = np.pad(wave, (0, max(0, settings.min_samples - len(wave))))
        out = self._mel(wave, sampling_rate=settings.sampling_rate, padding=False, truncation=False, return_tensors="np")
        tensor = np.ascontiguousarray(out["input_features"][0], dtype=np.float32)
        return MediaFeatures("audio", tensor, self._count(tensor.shape[1]))

    def _count(self, n_frames: int) -> int:
        if self.rule.audio_tokens is None:
            raise MediaError("the model does not take audio")
        return self.rule.audio_tokens(n_frames)

    def _video(self, data: bytes) -> MediaFeatures:
        settings = self.config.video
        frames, fps = decode_video(data, sample=self.config.sampling)
        return _visual(frames, "video", settings, self.most_pixels(len(frames)), settings.temporal / fps)

    def most_pixels(self, n: int) -> int:
        """Pixels that each of `n` frames of a film may have."""
        settings = self.config.video
        if not self.config.cap_pixels_per_frame:
            return settings.max_pixels
        total = int(self.config.max_video_tokens * (settings.patch * settings.merge) ** 2 * 0.9)
        return max(min(settings.max_pixels, total * settings.temporal // n), int(settings.min_pixels * 1.05))


def _visual(
    frames: np.ndarray, kind: Kind, settings: PatchSettings, max_pixels: int, second_per_grid: float | None
) -> MediaFeatures:
    frames = resize(frames, *settled_size(kind, frames.shape[1], frames.shape[2], settings, max_pixels), settings)
    mean, std = (np.asarray(values, np.float32) for values in (settings.mean, settings.std))
    pixels = (frames.astype(np.float32) * np.float32(settings.scale) - mean) / std
    tensor, grid = patchify(pixels, settings.patch, settings.merge, settings.temporal)
    return MediaFeatures(kind, tensor, math.prod(grid) // settings.merge**2, grid, second_per_grid)


def _outlined(
    kind: Kind, n: int, height: int, width: int, settings: PatchSettings, second_per_grid: float | None
) -> MediaFeatures:
    grid = -(-n // settings.temporal), height // settings.patch, width // settings.patch
    return MediaFeatures(kind, NO_TENSOR, math.prod(grid) // settings.merge**2, grid, second_per_grid)


def settled_size(kind: str, height: int, width: int, settings: PatchSettings, max_pixels: int) -> tuple[int, int]:
    """Height and width at which a picture or a frame is given to the tower.

    Raises:
        MediaError: the model's processor takes no such shape.
    """
    factor = settings.patch * settings.merge
    if settings.do_resize:
        return fit_size(height, width, factor, settings.min_pixels, max_pixels)
    if height % factor or width % factor:
        raise MediaError(
            f"{kind} of {width}x{height} pixels: the model's processor does not resize, so both sides must be multiples of "
            f"{factor}"
        )
    return height, width


def fit_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The nearest size whose sides are multiples of `factor` and whose area is within bounds, at nearly the same shape.

    `smart_resize` of Qwen2-VL's image processor. A side that rounds to nothing makes the area nothing, so that both sides are
    stretched to `min_pixels` from the size given, not from a rounded one.

    Raises:
        MediaError: one side is over 200 times the other.
    """
    if max(height, width) > 200 * min(height, width):
        raise MediaError(f"{width}x{height} pixels: the longer side may be at most 200 times the shorter")
    h, w = (round(side / factor) * factor for side in (height, width))
    if h * w > max_pixels:
        beta = math.sqrt(height * width / max_pixels)
        h, w = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
    elif h * w < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        h, w = (math.ceil(side * beta / factor) * factor for side in (height, width))
    return h, w


def resize(frames: np.ndarray, height: int, width: int, settings: PatchSettings) -> np.ndarray:
    """Frames of another size, with the filter that the settings name.

    Args:
        frames: uint8 [n, height, width, 3].

    Returns:
        uint8 [n, height, width, 3].
    """
    if (height, width) == frames.shape[1:3]:
        return frames
    name = RESAMPLE[settings.resample]
    if settings.filter == "pillow":
        from PIL import Image

        with_filter = Image.Resampling(settings.resample)
        return np.stack([np.asarray(Image.fromarray(frame).resize((width, height), with_filter)) for frame in frames])
    import torch
    from torch.nn.functional import interpolate

    pixels = torch.from_numpy(np.array(frames.transpose(0, 3, 1, 2), order="C"))
    smooth: dict[str, Any] = {} if name == "nearest" else {"antialias": True, "align_corners": False}
    return interpolate(pixels, size=(height, width), mode=name, **smooth).numpy().transpose(0, 2, 3, 1)


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

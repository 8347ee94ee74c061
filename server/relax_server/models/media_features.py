"""Media bytes to the tensors that a model's towers take, as the model folder's own processor would prepare them.

Where that processor needs torchvision, this calls what torchvision calls: `torch.nn.functional.interpolate` on 8-bit pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_sdk.errors import ConfigError, MediaError
from relax_sdk.measuring import film_size, sound_length
from relax_sdk.media import MediaRef, decode_audio, decode_image, decode_video
from relax_sdk.soundtrack import decode_soundtrack
from relax_server.models.media_item import NO_TENSOR, Kind, MediaFeatures
from relax_server.models.processor_config import RESAMPLE, FrameSampling, PatchSettings, ProcessorConfig

if TYPE_CHECKING:
    from relax_server.models.families.base import MediaRule

__all__ = ["NO_TENSOR", "FeatureExtractor", "Kind", "MediaFeatures"]


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
        made = self._made(data, kind)
        self._check_tokens(made)
        return made

    def _check_tokens(self, made: MediaFeatures) -> None:
        most = self.config.max_tokens
        if most is not None and made.n_tokens > most:
            raise MediaError(
                f"this {made.kind} has {made.n_tokens} tokens, more than media.max_tokens = {most}; give a shorter one, or a "
                "higher limit"
            )

    def _made(self, data: bytes, kind: Kind) -> MediaFeatures:
        if kind == "audio" and self.rule.audio is not None:
            return self._audio(decode_audio(data, self.config.audio.sampling_rate))
        if kind == "image":
            frames, settings = decode_image(data)[None], self.config.image
            size = settled_size("image", frames.shape[1], frames.shape[2], settings, settings.max_pixels)
            return _visual(frames, "image", settings, size, None)
        if kind == "video":
            return self._video(data)
        raise MediaError(f"the model does not take {kind}")

    def outline(self, data: bytes, ref: MediaRef) -> MediaFeatures:
        """The features of one item without their tensor; what it decodes of the item it does not hold.

        Raises:
            MediaError: damaged, empty, or not of a shape that the model's processor takes.
        """
        made = self._outline(data, ref)
        self._check_tokens(made)
        return made

    def _outline(self, data: bytes, ref: MediaRef) -> MediaFeatures:
        if ref.kind == "audio":
            length = sound_length(data, self.config.audio.sampling_rate)
            return MediaFeatures("audio", NO_TENSOR, self._count(self._mel_frames(length)[1]))
        if ref.kind == "image" and ref.width and ref.height:
            settings = self.config.image
            size = settled_size("image", ref.height, ref.width, settings, settings.max_pixels)
            return _outlined("image", 1, *size, settings, None)
        if ref.kind == "video":
            sampler = _Sampler(self.config.sampling)
            n, height, width, fps = film_size(data, sampler)
            settings, wave = self.config.video, self._soundtrack(data)
            heard = self._heard(wave)
            made = _outlined("video", n, *self.film_shape(n, height, width, heard), settings, settings.temporal / fps)
            sound = None if wave is None else MediaFeatures("audio", NO_TENSOR, heard)
            return replace(made, times=self._times(sampler), sound=sound, n_tokens=made.n_tokens + heard)
        return replace(self._made(data, ref.kind), tensor=NO_TENSOR)

    def _audio(self, wave: np.ndarray) -> MediaFeatures:
        settings = self.config.audio
        samples, n_frames = self._mel_frames(len(wave))
        wave = np.pad(wave, (0, max(0, samples - len(wave))))
        out = self._mel(wave, sampling_rate=settings.sampling_rate, padding=False, truncation=False, return_tensors="np")
        tensor = np.ascontiguousarray(out["input_features"][0][:, :n_frames], dtype=np.float32)
        return MediaFeatures("audio", tensor, self._count(tensor.shape[1]))

    def _mel_frames(self, length: int) -> tuple[int, int]:
        """Samples that a sound is filled up to, at least, and the mel frames that are taken of it.

        Raises:
            MediaError: longer than the model's processor takes.
        """
        settings = self.config.audio
        if not self.rule.padded_sounds:
            length = max(length, settings.min_samples)
            return length, length // settings.hop_length
        if length > settings.chunk_length * settings.sampling_rate:
            raise MediaError(
                f"a sound of {length / settings.sampling_rate:.1f} s: the model's processor takes {settings.chunk_length} s "
                "at most; give shorter sounds"
            )
        n_frames = max(3, -(-length // settings.hop_length))
        return n_frames * settings.hop_length + settings.n_fft, n_frames

    def _count(self, n_frames: int) -> int:
        if self.rule.audio_tokens is None:
            raise MediaError("the model does not take audio")
        return self.rule.audio_tokens(n_frames)

    def _video(self, data: bytes) -> MediaFeatures:
        settings, sampler = self.config.video, _Sampler(self.config.sampling)
        frames, fps = decode_video(data, sample=sampler)
        wave = self._soundtrack(data)
        size = self.film_shape(len(frames), frames.shape[1], frames.shape[2], self._heard(wave))
        seen = replace(_visual(frames, "video", settings, size, settings.temporal / fps), times=self._times(sampler))
        if wave is None:
            return seen
        sound = self._audio(wave)
        return replace(seen, sound=sound, n_tokens=seen.n_tokens + sound.n_tokens)

    def _soundtrack(self, data: bytes) -> np.ndarray | None:
        """The sound that is heard with a film; None: it is silent, or its sound is not asked for."""
        return decode_soundtrack(data, self.config.audio.sampling_rate) if self.config.hears_films else None

    def _heard(self, wave: np.ndarray | None) -> int:
        """Tokens of the sound of a film."""
        return 0 if wave is None else self._count(self._mel_frames(len(wave))[1])

    def _times(self, sampler: _Sampler) -> tuple[float, ...] | None:
        """Seconds at which each temporal patch is shown: between those of its first and its last frame."""
        if not self.rule.tells_times:
            return None
        if not sampler.fps:
            raise MediaError("the film does not state its frames per second, and the model is told the times of its parts")
        n = self.config.video.temporal
        frames = [*sampler.indices, *[sampler.indices[-1]] * (-len(sampler.indices) % n)]
        seconds = [index / sampler.fps for index in frames]
        return tuple((seconds[i] + seconds[i + n - 1]) / 2 for i in range(0, len(seconds), n))

    def film_shape(self, n: int, height: int, width: int, heard: int) -> tuple[int, int]:
        """Height and width at which each of n frames is given to the tower; `heard`: tokens of the film's sound."""
        settings, tokens = self.config.video, self.config.max_tokens
        if tokens is not None:
            tokens = max(1, tokens - heard)
        if not self.config.sampling.evenly or not settings.do_resize:
            most = self.most_pixels(n)
            if tokens is not None:
                settings = settings.at_most(tokens, n)
            return settled_size("video", height, width, settings, min(most, settings.max_pixels))
        most = self._most_of_film(n)
        if tokens is not None:
            most = min(most, settings.at_most(tokens, n).max_pixels * max(n, settings.temporal))
            settings = replace(settings, min_pixels=min(settings.min_pixels, most // 4))
        return fit_film(n, height, width, settings, most)

    def _most_of_film(self, n: int) -> int:
        """Pixels that n frames may have together."""
        settings = self.config.video
        if not self.config.cap_pixels_per_frame:
            return settings.max_pixels
        most = self.config.max_video_tokens * (settings.patch * settings.merge) ** 2
        return n * max(min(most, settings.max_pixels // n), int(settings.min_pixels * 1.05))

    def most_pixels(self, n: int) -> int:
        """Pixels that each of `n` frames of a film may have."""
        settings = self.config.video
        if not self.config.cap_pixels_per_frame:
            return settings.max_pixels
        total = int(self.config.max_video_tokens * (settings.patch * settings.merge) ** 2 * 0.9)
        return max(min(settings.max_pixels, total * settings.temporal // n), int(settings.min_pixels * 1.05))


class _Sampler:
    """Chooses frames as the settings do, and keeps which."""

    def __init__(self, sampling: FrameSampling) -> None:
        self._sampling = sampling
        self.indices: Sequence[int] = ()
        self.fps = 0.0

    def __call__(self, count: int, fps: float) -> Sequence[int]:
        self.indices, self.fps = self._sampling(count, fps), fps
        return self.indices


def _visual(
    frames: np.ndarray, kind: Kind, settings: PatchSettings, size: tuple[int, int], second_per_grid: float | None
) -> MediaFeatures:
    frames = resize(frames, *size, settings)
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


def fit_film(n: int, height: int, width: int, settings: PatchSettings, max_pixels: int) -> tuple[int, int]:
    """The size of n frames whose pixels together are within bounds: `smart_resize` of Qwen3-VL's video processor.

    Raises:
        MediaError: one side is over 200 times the other.
    """
    factor, temporal = settings.patch * settings.merge, settings.temporal
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > 200 * min(height, width):
        raise MediaError(f"{width}x{height} pixels: the longer side may be at most 200 times the shorter")
    h, w = (round(side / factor) * factor for side in (height, width))
    filled = max(temporal, round(n / temporal) * temporal)
    if filled * h * w > max_pixels:
        beta = math.sqrt(n * height * width / max_pixels)
        h, w = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
    elif filled * h * w < settings.min_pixels:
        beta = math.sqrt(settings.min_pixels / (n * height * width))
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

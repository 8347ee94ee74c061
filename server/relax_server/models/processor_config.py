"""A model folder's processor configuration: how the model's own processor prepares pictures, films and sounds.

The files, their order and their defaults are those of `AutoImageProcessor`, `AutoVideoProcessor` and `AutoFeatureExtractor` in
transformers 5.23: a part of `processor_config.json` before a file of its own, `preprocessor_config.json` last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from relax_sdk.errors import ConfigError, MediaError
from relax_sdk.media_config import MediaConfig
from relax_server.models.media_settings import read_settings

Filter = Literal["torchvision", "pillow"]

PROCESSOR = "processor_config.json"
PREPROCESSOR = "preprocessor_config.json"
VIDEO = "video_preprocessor_config.json"

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

_FRAME_SIZES = {
    "Qwen2_5OmniProcessor": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
    "Qwen3OmniMoeProcessor": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
}
"""Pixels of a film's frame that these classes ask for, whatever the size in their video processor's file."""

_IMAGE_CLASSES: dict[str, Filter] = {
    "Qwen2VLImageProcessor": "torchvision",
    "Qwen2VLImageProcessorFast": "torchvision",
    "Qwen2VLImageProcessorPil": "pillow",
}
_IMAGE_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28}
_FRAME_SIZE = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
_VIDEO_CLASSES = ("Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor")
_EVENLY = "Qwen3VLVideoProcessor"
"""The class that spreads the frames it takes evenly, first and last among them, and bounds the pixels of all together."""
_EVENLY_DEFAULTS: dict[str, Any] = dict(
    **{"size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}, "patch_size": 16, "fps": 2},
    **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_sample_frames": True, "max_video_tokens": 768},
)
_AUDIO_CLASSES = ("WhisperFeatureExtractor",)
RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
"""Pillow's numbers of its filters, which the files use."""


@dataclass(frozen=True)
class PatchSettings:
    """How a picture, or a frame of a film, becomes patches."""

    min_pixels: int
    """Area after resizing, at least."""
    max_pixels: int
    patch: int
    """Side of a patch in pixels."""
    temporal: int
    """Frames a patch spans."""
    merge: int
    """Patches along each side that become one token."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    do_resize: bool
    resample: int
    """Number of the filter, a key of `RESAMPLE`."""
    filter: Filter
    """The implementation of the filter. Both round to 8 bits between the two directions, and may take these in another order:
    most pixels are equal, and at hard edges some differ by up to 25 of 255 levels."""
    scale: float
    """A pixel's value is multiplied by this first; 1 without rescaling."""

    def at_most(self, tokens: int, frames: int | None = None) -> PatchSettings:
        """These settings for items of at most so many tokens.

        Args:
            tokens: of the item.
            frames: of a film, all of which have the same size; None: the item is one picture.
        """
        spans = 1 if frames is None else -(-frames // self.temporal)
        most = min(self.max_pixels, max(1, tokens // spans) * (self.patch * self.merge) ** 2)  # a patch has a token at least
        return replace(self, max_pixels=most, min_pixels=min(self.min_pixels, most // 4))  # sides are rounded up to it

    @classmethod
    def read(cls, raw: dict[str, Any], size: dict[str, int], filter: Filter, file: str) -> PatchSettings:
        """Settings from the JSON of one processor.

        Args:
            raw: the JSON; a missing field takes the class's default.
            size: the class's default size.
            filter: whose implementation resizes.
            file: names the JSON in errors.

        Raises:
            ConfigError: a field is missing where it has no default, or is not usable.
        """
        size = raw.get("size") or size
        settings = cls(
            min_pixels=raw.get("min_pixels") or size.get("shortest_edge") or 0,
            max_pixels=raw.get("max_pixels") or size.get("longest_edge") or 0,
            patch=raw.get("patch_size", 14),
            temporal=raw.get("temporal_patch_size", 2),
            merge=raw.get("merge_size", 2),
            mean=_three(raw.get("image_mean") or CLIP_MEAN) if raw.get("do_normalize", True) else (0.0, 0.0, 0.0),
            std=_three(raw.get("image_std") or CLIP_STD) if raw.get("do_normalize", True) else (1.0, 1.0, 1.0),
            do_resize=raw.get("do_resize", True),
            resample=raw.get("resample", 3),
            filter=filter,
            scale=raw.get("rescale_factor", 1 / 255) if raw.get("do_rescale", True) else 1.0,
        )
        if not 0 < settings.min_pixels <= settings.max_pixels:
            raise ConfigError(f"{file}: size needs shortest_edge and longest_edge (areas in pixels, ascending), got {size}")
        allowed = RESAMPLE if filter == "pillow" else {0: "nearest", 2: "bilinear", 3: "bicubic"}
        if settings.resample not in allowed:
            names = ", ".join(f"{number} ({name})" for number, name in allowed.items())
            raise ConfigError(f"{file}: resample = {settings.resample!r}; allowed for {filter}'s filters: {names}")
        return settings


@dataclass(frozen=True)
class FrameSampling:
    """Which frames of a film are taken: all of them, a number of them, or so many a second.

    The rules of `Qwen2VLVideoProcessor.sample_frames`; a film of fewer frames than one patch spans is taken whole, where
    that function fails.
    """

    enabled: bool
    fps: float | None
    num_frames: int | None
    min_frames: int
    max_frames: int
    temporal: int
    bounded: bool = False
    """Whether a run limits the frames, also of films that would be taken whole."""
    evenly: bool = False
    """Whether frames are spread evenly over a film, as `Qwen3VLVideoProcessor` does."""

    def __call__(self, count: int, fps: float) -> Sequence[int]:
        """Indices of the frames to take, ascending.

        Args:
            count: frames of the film.
            fps: frames per second of the film; 0 where its file does not state them.

        Raises:
            MediaError: `num_frames` is more than the film has, or frames per second are asked of a film that states none.
        """
        wanted = self._spread(count, fps) if self.evenly else self._wanted(count, fps)
        if wanted is None and self.bounded and count > self.max_frames:
            wanted = self.max_frames // self.temporal * self.temporal
        if wanted is None:
            return range(count)
        if self.evenly:
            return np.linspace(0, count - 1, wanted).round().astype(int).tolist()
        import torch  # its arithmetic decides at exact halves

        return torch.arange(0, count, count / wanted).int().clamp(max=count - 1).tolist()

    def _spread(self, count: int, fps: float) -> int | None:
        """Number of frames that are spread evenly, or None for all."""
        if not self.enabled or count < self.temporal:
            return None
        wanted = count
        if self.num_frames is not None:
            self._check_number(self.num_frames, count)
            return self.num_frames
        if self.fps is not None:
            self._check_rate(fps)
            wanted = int(count / fps * self.fps)
        return min(max(wanted, self.min_frames), self.max_frames, count)

    def _check_number(self, n: int, count: int) -> None:
        if n > count:
            raise MediaError(
                f"the model's processor takes {n} frames of a film and this one has {count}; give longer films, or set "
                f"fps in place of num_frames in the model folder's {VIDEO}"
            )

    def _check_rate(self, fps: float) -> None:
        if not fps:
            raise MediaError(
                f"the film does not state its frames per second, and the model's processor takes {self.fps:g} of them"
            )

    def _wanted(self, count: int, fps: float) -> int | None:
        """Number of frames, or None for all."""
        t = self.temporal
        if not self.enabled or count < t:
            return None
        if self.num_frames is not None:
            n = max(t, round(self.num_frames / t) * t)
            self._check_number(n, count)
            return n
        if self.fps is None:
            return None
        self._check_rate(fps)
        most = min(self.max_frames, count) // t * t
        return max(t, int(min(max(count / fps * self.fps, self.min_frames), most, count)) // t * t)


@dataclass(frozen=True)
class AudioSettings:
    """Arguments of `WhisperFeatureExtractor`."""

    feature_size: int = 80
    sampling_rate: int = 16_000
    hop_length: int = 160
    chunk_length: int = 30
    n_fft: int = 400
    padding_value: float = 0.0

    @property
    def min_samples(self) -> int:
        """Samples of the shortest sound that the spectrogram's reflected edges allow."""
        return self.n_fft // 2 + 1


@dataclass(frozen=True)
class ProcessorConfig:
    """All settings for media of one model folder."""

    image: PatchSettings
    video: PatchSettings
    sampling: FrameSampling
    cap_pixels_per_frame: bool
    """Whether a frame is also limited to its share of `max_video_tokens`."""
    max_video_tokens: int
    audio: AudioSettings
    max_tokens: int | None = None
    """Tokens of one item, at most."""
    hears_films: bool = False
    """Whether a film's sound is heard with it."""

    def limited(self, media: MediaConfig) -> ProcessorConfig:
        """These settings within the limits of a run."""
        image, sampling = self.image, self.sampling
        frames = [n for n in (sampling.max_frames, media.max_frames) if n is not None]
        if media.max_tokens is not None:
            image = image.at_most(media.max_tokens)
            frames.append(media.max_tokens * sampling.temporal)  # each temporal patch has a token at least
        if media.fps is not None:
            sampling = replace(sampling, enabled=True, fps=media.fps, num_frames=None)
        most = max(sampling.temporal, min(frames))
        if media.max_frames is not None or media.max_tokens is not None:
            fewest = min(sampling.min_frames, most)
            number = None if sampling.num_frames is None else min(sampling.num_frames, most)
            sampling = replace(sampling, max_frames=most, min_frames=fewest, num_frames=number, bounded=True)
        return replace(self, image=image, sampling=sampling, max_tokens=media.max_tokens, hears_films=media.use_audio_in_video)

    @property
    def digest(self) -> str:
        """A short name of the settings, equal where all of them are."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    @classmethod
    def load(cls, folder: Path) -> ProcessorConfig:
        """Read a model folder.

        Raises:
            ConfigError: no such file, not JSON, a processor of another class, or a setting that cannot be used.
        """
        files = {name: _read(folder / name) for name in (PROCESSOR, VIDEO, PREPROCESSOR)}
        if not any(files.values()):
            raise ConfigError(f"{folder}: no {PREPROCESSOR} and no {PROCESSOR}, so how media are prepared is not known")
        outer, own, shared = (files[name] or {} for name in (PROCESSOR, VIDEO, PREPROCESSOR))
        image: dict[str, Any] = outer.get("image_processor") or shared
        video: dict[str, Any] = dict(outer.get("video_processor") or own or shared)
        audio: dict[str, Any] = outer.get("feature_extractor") or shared
        for size in [_FRAME_SIZES[n] for row in (outer, own, shared) if (n := row.get("processor_class")) in _FRAME_SIZES]:
            video = {k: v for k, v in video.items() if k not in ("min_pixels", "max_pixels")} | {"size": size}
        if given := outer.get("videos_kwargs"):
            edges = ("min_pixels", "max_pixels") if "size" in given else ()
            video = {k: v for k, v in video.items() if k not in edges} | given
        if _check_class(folder, "video_processor_type", video, _VIDEO_CLASSES) == _EVENLY:
            video = _EVENLY_DEFAULTS | video
        _check_class(folder, "feature_extractor_type", audio, _AUDIO_CLASSES)
        name = _check_class(folder, "image_processor_type", image, tuple(_IMAGE_CLASSES))
        frames = PatchSettings.read(
            video,
            {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
            "torchvision",
            f"{folder}: the video processor",
        )
        return cls(
            image=PatchSettings.read(
                image,
                _IMAGE_SIZE,
                _IMAGE_CLASSES[name or "Qwen2VLImageProcessor"],
                f"{folder}: the image processor",
            ),
            video=frames,
            sampling=_sampling(folder, video, frames.temporal),
            cap_pixels_per_frame=bool(video.get("cap_pixels_per_frame")),
            max_video_tokens=video.get("max_video_tokens", 128_000),
            audio=_audio(folder, audio),
        ).limited(read_settings(folder))

    def check_model(self, folder: Path, vision: Any, audio: Any) -> None:
        """Compare with the towers that take the features.

        Args:
            folder: named in the error.
            vision: the model's `vision_config`.
            audio: the model's `audio_config`; None: it does not hear.

        Raises:
            ConfigError: patches or mel bands are not of the size the towers take.
        """
        pairs: list[tuple[str, int, str, int]] = []
        if audio is not None:
            pairs = [("num_mel_bins", audio.num_mel_bins, "feature_size", self.audio.feature_size)]
        for settings in (self.image, self.video):
            pairs += [
                ("patch_size", vision.patch_size, "patch_size", settings.patch),
                ("temporal_patch_size", vision.temporal_patch_size, "temporal_patch_size", settings.temporal),
                ("spatial_merge_size", vision.spatial_merge_size, "merge_size", settings.merge),
            ]
        for theirs, wanted, ours, found in pairs:
            if wanted != found:
                raise ConfigError(
                    f"{folder}: the model's {theirs} is {wanted} and its processor configuration's {ours} is {found}"
                )


def _sampling(folder: Path, video: dict[str, Any], temporal: int) -> FrameSampling:
    fps, number = video.get("fps"), video.get("num_frames")
    if fps is not None and number is not None:
        raise ConfigError(f"{folder}: fps = {fps} and num_frames = {number} in the video processor; set one of them")
    for name, value in (("fps", fps), ("num_frames", number)):
        if value is not None and not (isinstance(value, (int, float)) and value > 0):
            raise ConfigError(f"{folder}: {name} = {value!r} in the video processor; allowed: above 0")
    return FrameSampling(
        enabled=bool(video.get("do_sample_frames", False)),
        fps=fps,
        num_frames=number,
        min_frames=video.get("min_frames", 4),
        max_frames=video.get("max_frames", 768),
        temporal=temporal,
        evenly=video.get("video_processor_type") == _EVENLY,
    )


def _audio(folder: Path, raw: dict[str, Any]) -> AudioSettings:
    if raw.get("dither"):
        raise ConfigError(
            f"{folder}: dither = {raw['dither']} adds noise, and engine and trainer would not hear the same; set 0.0"
        )
    return AudioSettings(**{name: raw[name] for name in AudioSettings.__dataclass_fields__ if name in raw})


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: not a JSON object")
    return found


def _check_class(folder: Path, key: str, raw: dict[str, Any], known: tuple[str, ...]) -> str | None:
    name = raw.get(key)
    if name is not None and name not in known:
        raise ConfigError(f"{folder}: {key} = {name!r} is not known here; known: {', '.join(known)}")
    return name


def _three(values: Any) -> tuple[float, float, float]:
    first, second, third = values
    return float(first), float(second), float(third)

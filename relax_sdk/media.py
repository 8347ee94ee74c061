"""Images, sounds and videos by content hash: bytes are kept once and never re-encoded on their way to engine and trainer."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from relax_sdk.decoding import SAMPLING_RATE, decode_audio, decode_image, decode_video
from relax_sdk.errors import MediaError

if TYPE_CHECKING:
    from typing import Self

    from PIL import Image as PILImage

Kind = Literal["image", "audio", "video"]


@dataclass(frozen=True)
class MediaLimits:
    """What a single media item may cost to hold and to decode."""

    max_bytes: int = 64 * 2**20
    max_pixels: int = 4096 * 4096
    """Width times height of an image or of one video frame."""
    max_seconds: float = 600.0
    """Duration of a sound or video."""
    max_frames: int = 18_000
    """Frames of a video."""
    max_samples: int = 120_000_000
    """Samples of a sound, all channels together."""


LIMITS = MediaLimits()


@dataclass(frozen=True)
class MediaRef:
    """Names one media item: the sha256 of its bytes and what is needed without decoding it."""

    sha256: str
    mime: str
    size: int
    """Bytes."""
    width: int | None = None
    """Pixels; images and videos."""
    height: int | None = None
    duration: float | None = None
    """Seconds; sounds and videos."""
    sampling_rate: int | None = None
    """Hz as stored; sounds."""
    fps: float | None = None
    """Frames per second as stored; videos."""

    @property
    def kind(self) -> Kind:
        """`image`, `audio` or `video`."""
        return self.mime.split("/", 1)[0]  # type: ignore[return-value]

    @property
    def extension(self) -> str:
        """The file ending of the store's copy, with its dot."""
        return _EXTENSIONS.get(self.mime, ".bin")


@dataclass(frozen=True)
class Media:
    """A part of a message that is not text. Build one with a `from_…` constructor."""

    kind: ClassVar[Kind]
    ref: MediaRef
    _data: bytes | None = field(default=None, repr=False, compare=False)
    _path: str | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_bytes(cls, data: bytes, *, limits: MediaLimits = LIMITS) -> Self:
        """Take an encoded file (PNG, JPEG, WAV, FLAC, MP3, MP4, …) as it is.

        Raises:
            MediaError: too large, not of this kind, or its header cannot be read.
        """
        return cls(probe(data, cls.kind, limits), _data=bytes(data))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, limits: MediaLimits = LIMITS) -> Self:
        """Take a file as it is; its bytes are read again when they are stored.

        Raises:
            MediaError: missing, too large, not of this kind, or its header cannot be read.
        """
        try:
            size = os.stat(path).st_size
            if size > limits.max_bytes:
                raise MediaError(f"{path}: {size:,} bytes, more than the limit of {limits.max_bytes:,}")
            data = Path(path).read_bytes()
        except OSError as error:
            raise MediaError(f"{path}: cannot be read ({error.strerror})") from error
        try:
            return cls(probe(data, cls.kind, limits), _path=str(path))
        except MediaError as error:
            raise MediaError(f"{path}: {error}") from error

    def bytes(self) -> bytes:
        """The encoded bytes.

        Raises:
            MediaError: this part carries only a reference, or its file is gone or has changed since it was hashed.
        """
        if self._data is not None:
            return self._data
        if self._path is None:
            raise MediaError(f"{self.kind} {self.ref.sha256[:12]} carries no bytes; read it from the store that holds it")
        try:
            data = Path(self._path).read_bytes()
        except OSError as error:
            raise MediaError(f"{self._path}: cannot be read ({error.strerror})") from error
        if hashlib.sha256(data).hexdigest() != self.ref.sha256:
            raise MediaError(f"{self._path}: changed after it was first read")
        return data

    def to_ref(self) -> Self:
        """The same part without its bytes, small enough for a message log."""
        return replace(self, _data=None, _path=None)

    def data_uri(self) -> str:
        """`data:<mime>;base64,…`, the form that OpenAI-compatible servers accept."""
        import base64

        return f"data:{self.ref.mime};base64,{base64.b64encode(self.bytes()).decode('ascii')}"


@dataclass(frozen=True)
class Image(Media):
    """A still picture."""

    kind: ClassVar[Kind] = "image"

    @classmethod
    def from_array(cls, pixels: np.ndarray) -> Image:
        """Encode pixels losslessly (PNG).

        Args:
            pixels: uint8, shape [height, width], [height, width, 3] or [height, width, 4].

        Raises:
            MediaError: wrong dtype or shape, or too large.
        """
        from PIL import Image as PILImage

        shape_ok = pixels.ndim in (2, 3) and pixels.size > 0 and (pixels.ndim == 2 or pixels.shape[2] in (3, 4))
        if pixels.dtype != np.uint8 or not shape_ok:
            raise MediaError(f"Image.from_array wants uint8 [height, width(, 3 or 4)], got {pixels.dtype} {list(pixels.shape)}")
        return cls.from_pil(PILImage.fromarray(pixels))

    @classmethod
    def from_pil(cls, image: PILImage.Image) -> Image:
        """Encode a Pillow image losslessly (PNG)."""
        buffer = io.BytesIO()
        image.save(buffer, format="PNG", compress_level=1)
        return cls.from_bytes(buffer.getvalue())

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        from PIL import Image as PILImage

        PILImage.fromarray(decode_image(self.bytes())).save(buffer, format="PNG")
        return buffer.getvalue()


@dataclass(frozen=True)
class Audio(Media):
    """A sound."""

    kind: ClassVar[Kind] = "audio"

    @classmethod
    def from_array(cls, samples: np.ndarray, sampling_rate: int = SAMPLING_RATE) -> Audio:
        """Encode samples as WAV: 16-bit when all are within [-1, 1], else 32-bit float.

        Args:
            samples: float, shape [n] or [n, channels]; finite, usually within [-1, 1].
            sampling_rate: Hz.

        Raises:
            MediaError: empty, not finite, wrong shape, or a sampling rate or number of channels that WAV cannot hold.
        """
        import soundfile

        wave = np.asarray(samples)
        if wave.ndim not in (1, 2) or wave.size == 0 or not np.issubdtype(wave.dtype, np.floating):
            raise MediaError(
                f"Audio.from_array wants non-empty floats [n] or [n, channels], got {wave.dtype} {list(wave.shape)}"
            )
        if not np.isfinite(wave).all():
            raise MediaError(f"Audio.from_array: {int((~np.isfinite(wave)).sum())} of {wave.size} samples are NaN or infinite")
        buffer = io.BytesIO()
        subtype = "PCM_16" if np.abs(wave).max() <= 1.0 else "FLOAT"
        try:
            soundfile.write(buffer, wave.astype(np.float32), sampling_rate, format="WAV", subtype=subtype)
        except (soundfile.SoundFileError, TypeError, ValueError, OverflowError) as error:
            shape = f"{list(wave.shape)} at {sampling_rate!r} Hz"
            raise MediaError(f"Audio.from_array: samples {shape} cannot be written as WAV ({error})") from error
        return cls.from_bytes(buffer.getvalue())

    def _repr_html_(self) -> str:
        return f'<audio controls src="{self.data_uri()}"></audio>'


@dataclass(frozen=True)
class Video(Media):
    """Moving pictures; a soundtrack is ignored."""

    kind: ClassVar[Kind] = "video"

    @classmethod
    def from_array(cls, frames: np.ndarray, fps: float = 4.0) -> Video:
        """Encode frames once (H.264 in MP4, nearly lossless); the same bytes then go to engine and trainer.

        Args:
            frames: uint8 [n_frames, height, width, 3]; height and width even.
            fps: frames per second.

        Raises:
            MediaError: wrong dtype or shape, too large, or a frame rate that is not above 0.
        """
        import av
        from av.error import FFmpegError

        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or frames.size == 0:
            raise MediaError(
                f"Video.from_array wants uint8 [n_frames, height, width, 3], got {frames.dtype} {list(frames.shape)}"
            )
        if not 0 < fps <= 1000:
            raise MediaError(f"Video.from_array: fps = {fps!r}; allowed: above 0, at most 1000")
        if frames.shape[1] % 2 or frames.shape[2] % 2:
            raise MediaError(f"Video.from_array wants even height and width, got {frames.shape[1]}x{frames.shape[2]}")
        buffer = io.BytesIO()
        try:
            with av.open(buffer, "w", format="mp4") as container:
                stream: Any = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
                stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
                stream.thread_count = 1
                stream.options = {"crf": "10", "preset": "veryfast", "tune": "zerolatency"}
                for pixels in frames:
                    container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")))
                container.mux(stream.encode())
        except (FFmpegError, ValueError, OverflowError, ZeroDivisionError) as error:
            raise MediaError(f"Video.from_array: {list(frames.shape)} at {fps!r} fps cannot be encoded ({error})") from error
        return cls.from_bytes(buffer.getvalue())

    def _repr_html_(self) -> str:
        return f'<video controls loop autoplay muted width="256" src="{self.data_uri()}"></video>'


PARTS: dict[str, type[Media]] = {"image": Image, "audio": Audio, "video": Video}


def from_ref(ref: MediaRef, data: bytes | None = None) -> Media:
    """The part of the right class for a reference, with or without its bytes.

    Raises:
        MediaError: the reference is not to an image, sound or video.
    """
    return _part_class(ref)(ref, data)


def _part_class(ref: MediaRef) -> type[Media]:
    if ref.kind not in PARTS:
        raise MediaError(f"{ref.sha256[:12]} is {ref.mime!r}, not an image, audio or video")
    return PARTS[ref.kind]


# --------------------------------------------------------------------------------------------------------------- store


class MediaStore:
    """A folder of media files named by the sha256 of their bytes; safe for several processes at once."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MediaError(f"media folder {self.root} cannot be created ({error.strerror})") from error

    def put(self, media: Media) -> MediaRef:
        """Write the bytes if they are not yet here, after decoding them once to be sure they are whole.

        Raises:
            MediaError: damaged, not what its hash says, or the folder cannot be written.
        """
        path = self.path(media.ref)
        if path.exists():
            return media.ref
        data = media.bytes()
        if hashlib.sha256(data).hexdigest() != media.ref.sha256:
            raise MediaError(f"{media.kind}: its bytes do not have the sha256 {media.ref.sha256[:12]}… that it claims")
        verify(data, media.ref)
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_bytes(data)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise MediaError(f"media folder {self.root} cannot be written ({error.strerror})") from error
        return media.ref

    def path(self, ref: MediaRef) -> Path:
        """Where the bytes of `ref` are or would be."""
        if len(ref.sha256) != 64 or not all(c in "0123456789abcdef" for c in ref.sha256):
            raise MediaError(f"not a sha256: {ref.sha256!r}")
        return self.root / ref.sha256[:2] / (ref.sha256 + ref.extension)

    def find(self, sha256: str) -> MediaRef | None:
        """The reference of a stored item by the hash of its bytes; None: not in this store.

        Raises:
            MediaError: not a sha256, or the file cannot be read.
        """
        folder = self.path(MediaRef(sha256, "", 0)).parent
        for mime, extension in _EXTENSIONS.items():
            path = folder / (sha256 + extension)
            if path.exists():
                return probe(path.read_bytes(), mime.split("/", 1)[0])  # type: ignore[arg-type]
        return None

    def get(self, ref: MediaRef) -> bytes:
        """The stored bytes.

        Raises:
            MediaError: not in this store.
        """
        try:
            return self.path(ref).read_bytes()
        except FileNotFoundError as error:
            raise MediaError(f"{ref.kind} {ref.sha256[:12]} is not in {self.root}") from error

    def load(self, ref: MediaRef) -> Media:
        """A part that reads its bytes from this store."""
        return _part_class(ref)(ref, None, str(self.path(ref)))


# ------------------------------------------------------------------------------------------------------------- probing


def probe(data: bytes, kind: Kind, limits: MediaLimits = LIMITS) -> MediaRef:
    """Read an item's header and check it against the limits.

    Raises:
        MediaError: empty, too large, not of `kind`, or the header cannot be read.
    """
    if not data:
        raise MediaError(f"empty {kind} (0 bytes)")
    if len(data) > limits.max_bytes:
        raise MediaError(f"{kind} of {len(data):,} bytes, more than the limit of {limits.max_bytes:,}")
    facts = {"image": _probe_image, "audio": _probe_audio, "video": _probe_video}[kind](data, limits)
    return MediaRef(sha256=hashlib.sha256(data).hexdigest(), size=len(data), **facts)


def _probe_image(data: bytes, limits: MediaLimits) -> dict[str, Any]:
    from PIL import Image as PILImage

    try:
        with PILImage.open(io.BytesIO(data)) as image:
            mime, (width, height) = image.get_format_mimetype(), image.size
    except Exception as error:
        raise MediaError(f"not a readable image ({error})") from error
    _check_pixels("image", width, height, limits)
    return dict(mime=mime or "image/unknown", width=width, height=height)


def _probe_audio(data: bytes, limits: MediaLimits) -> dict[str, Any]:
    import soundfile

    try:
        info = soundfile.info(io.BytesIO(data))
    except Exception as error:
        raise MediaError(f"not a readable sound ({error})") from error
    if info.frames <= 0:
        raise MediaError("the sound holds a header but no samples")
    if info.duration > limits.max_seconds:
        raise MediaError(f"sound of {info.duration:.1f} s, more than the limit of {limits.max_seconds:g} s")
    if info.frames * info.channels > limits.max_samples:
        raise MediaError(
            f"sound of {info.frames:,} samples in {info.channels} channels, more than the limit of {limits.max_samples:,}"
        )
    mime = {"WAV": "audio/wav", "FLAC": "audio/flac", "OGG": "audio/ogg", "MP3": "audio/mpeg"}.get(info.format, "audio/unknown")
    return dict(mime=mime, duration=info.duration, sampling_rate=info.samplerate)


def _probe_video(data: bytes, limits: MediaLimits) -> dict[str, Any]:
    import av

    try:
        with av.open(io.BytesIO(data), "r") as container:
            if not container.streams.video:
                raise MediaError("the file holds no video stream")
            stream = container.streams.video[0]
            width, height = stream.codec_context.width, stream.codec_context.height
            fps = float(stream.average_rate or 0) or None
            duration = container.duration / av.time_base if container.duration else None
            frames = stream.frames or int((duration or 0) * (fps or 0))
            mime = _VIDEO_FORMATS.get(container.format.name)
            if mime is None:
                raise MediaError(f"not a video but {container.format.long_name}; allowed: MP4, WebM, Matroska, AVI, GIF")
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(f"not a readable video ({error})") from error
    _check_pixels("video frame", width, height, limits)
    if duration is not None and duration > limits.max_seconds:
        raise MediaError(f"video of {duration:.1f} s, more than the limit of {limits.max_seconds:g} s")
    if frames > limits.max_frames:
        raise MediaError(f"video of {frames:,} frames, more than the limit of {limits.max_frames:,}")
    return dict(mime=mime, width=width, height=height, duration=duration, fps=fps)


def _check_pixels(what: str, width: int, height: int, limits: MediaLimits) -> None:
    if width * height > limits.max_pixels:
        raise MediaError(f"{what} of {width}x{height} pixels, more than the limit of {limits.max_pixels:,}")
    if width < 1 or height < 1:
        raise MediaError(f"{what} of {width}x{height} pixels")


def verify(data: bytes, ref: MediaRef) -> None:
    """Decode an item once, so that damage is found where the item enters and not in the engine.

    Raises:
        MediaError: damaged or truncated.
    """
    if ref.kind == "image":
        decode_image(data)
    elif ref.kind == "audio":
        decode_audio(data)
    else:
        decode_video(data, max_frames=8)


_VIDEO_FORMATS = {
    "mov,mp4,m4a,3gp,3g2,mj2": "video/mp4",
    "matroska,webm": "video/webm",
    "avi": "video/x-msvideo",
    "gif": "video/gif",
}
"""MIME type by the name FFmpeg gives the container."""

_EXTENSIONS = {
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/webp": ".webp",
    "image/gif": ".gif",
    "audio/wav": ".wav",
    "audio/flac": ".flac",
    "audio/ogg": ".ogg",
    "audio/mpeg": ".mp3",
    "video/mp4": ".mp4",
    "video/webm": ".webm",
    "video/x-msvideo": ".avi",
    "video/gif": ".gif",
}

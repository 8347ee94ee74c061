"""What an encoded image, sound or film says of itself: its header, read and checked against limits without trusting it."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from relax_sdk.decoding import check_mode, decode_audio, decode_image, decode_video
from relax_sdk.errors import MediaError

if TYPE_CHECKING:
    from PIL import Image as PILImage

Kind = Literal["image", "audio", "video"]
MediaKey = tuple[Kind, str]
"""Kind and sha256 of an item: the same GIF is another item as an image than as a film."""


@dataclass(frozen=True)
class MediaLimits:
    """Limits of what a single media item may cost to hold and to decode."""

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
    """Pixels, as shown (EXIF orientation applied); images and videos."""
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
    def key(self) -> MediaKey:
        """What features, and whatever else is made of the item, are kept under."""
        return self.kind, self.sha256

    @property
    def extension(self) -> str:
        """The file ending of the store's copy, with its dot."""
        return EXTENSIONS.get(self.mime, ".bin")


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
            check_mode(image.mode)
            mime, (width, height) = image.get_format_mimetype(), image.size
            if _lies_on_its_side(image):
                width, height = height, width
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(f"not a readable image ({error})") from error
    _check_pixels("image", width, height, limits)
    return dict(mime=mime or "image/unknown", width=width, height=height)


def _lies_on_its_side(image: PILImage.Image) -> bool:
    """Whether the EXIF orientation turns the image by a quarter and Pillow's size is of the image as stored."""
    from PIL.ExifTags import Base

    if image.format == "TIFF":
        return False  # Pillow turns it itself
    if image.format == "PNG" and "exif" not in image.info:
        return False  # the question would decode the whole image
    return image.getexif().get(Base.Orientation, 1) in (5, 6, 7, 8)


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

EXTENSIONS = {
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/webp": ".webp",
    "image/gif": ".gif",
    "image/bmp": ".bmp",
    "image/tiff": ".tiff",
    "audio/wav": ".wav",
    "audio/flac": ".flac",
    "audio/ogg": ".ogg",
    "audio/mpeg": ".mp3",
    "video/mp4": ".mp4",
    "video/webm": ".webm",
    "video/x-msvideo": ".avi",
    "video/gif": ".gif",
}
"""File ending of the store's copy by MIME type."""

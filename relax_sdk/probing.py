"""What an encoded image, sound or film says of itself: its header, read and checked against limits without trusting it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relax_sdk.decoding import decode_audio, decode_image, decode_video, open_image, open_sound
from relax_sdk.errors import MediaError
from relax_sdk.films import measure_film
from relax_sdk.media_formats import EXTENSIONS, Kind, sniff
from relax_sdk.media_limits import LIMITS, MediaLimits

if TYPE_CHECKING:
    from PIL import Image as PILImage

MediaKey = tuple[Kind, str]
"""Kind and sha256 of an item: the same GIF is another item as an image than as a film."""

VERIFIED_PIXELS = 2**25
"""Pixels of a film's frames that are held while it is verified; at least two frames, at most eight."""


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
    """Read an item's header and check it against the limits; nothing is decoded.

    Raises:
        MediaError: empty, too large, of a format that is not taken, or the header cannot be read.
    """
    limits.check_size(kind, len(data))
    facts = {"image": _probe_image, "audio": _probe_audio, "video": _probe_video}[kind](data, limits)
    return MediaRef(sha256=hashlib.sha256(data).hexdigest(), size=len(data), **facts)


def _probe_image(data: bytes, limits: MediaLimits) -> dict[str, Any]:
    try:
        with open_image(data, limits) as image:
            width, height = image.size
            if _lies_on_its_side(image):
                width, height = height, width
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(f"not a readable image ({error})") from error
    return dict(mime=sniff(data, "image").mime, width=width, height=height)


def _lies_on_its_side(image: PILImage.Image) -> bool:
    """Whether the EXIF orientation turns the image by a quarter and Pillow's size is of the image as stored."""
    from PIL.ExifTags import Base

    if image.format == "TIFF":
        return False  # Pillow turns it itself
    if image.format == "PNG" and "exif" not in image.info:
        return False  # the question would decode the whole image
    return image.getexif().get(Base.Orientation, 1) in (5, 6, 7, 8)


def _probe_audio(data: bytes, limits: MediaLimits) -> dict[str, Any]:
    try:
        with open_sound(data, limits) as (format, sound):
            return dict(mime=format.mime, duration=sound.frames / sound.samplerate, sampling_rate=sound.samplerate)
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(f"not a readable sound ({error})") from error


def _probe_video(data: bytes, limits: MediaLimits) -> dict[str, Any]:
    film = measure_film(data, limits)
    return dict(mime=film.format.mime, width=film.width, height=film.height, duration=film.duration, fps=film.fps)


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
        pixels = (ref.width or 1) * (ref.height or 1)
        decode_video(data, max_frames=max(2, min(8, VERIFIED_PIXELS // pixels)))

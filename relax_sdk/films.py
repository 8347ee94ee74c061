"""Films by FFmpeg: opened by a demuxer that is named, from memory and nothing else, and measured without being decoded."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relax_sdk.errors import MediaError
from relax_sdk.media_formats import FILM_CODECS, MediaFormat, sniff
from relax_sdk.media_limits import MediaLimits

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

DECODERS = ",".join(name for names in FILM_CODECS.values() for name in names)
MAX_STREAMS = 64
"""Streams that a film may have; FFmpeg opens no file with more."""


@dataclass(frozen=True)
class FilmFacts:
    """What was found in a film without decoding it."""

    format: MediaFormat
    width: int
    height: int
    frames: int
    """Packets of pictures that are there, whatever the header says; some films have a few that are not shown."""
    duration: float | None
    """Seconds."""
    fps: float | None
    """Frames per second."""


@contextmanager
def open_film(data: bytes, limits: MediaLimits) -> Iterator[tuple[InputContainer, VideoStream]]:
    """A film and its stream of pictures, decoded in one thread.

    FFmpeg looks at no other format than the one that the bytes begin with, opens no file and no address that the film names,
    and has only the decoders of `FILM_CODECS`.

    Raises:
        MediaError: no film of a format that is taken, or there are no pictures in it.
    """
    import av
    from av.stream import Discard

    demuxer = sniff(data, "video").decoder
    options = {
        "format_whitelist": demuxer,
        "protocol_whitelist": "none",
        "codec_whitelist": DECODERS,
        "max_pixels": str(limits.max_pixels),
        "max_streams": str(MAX_STREAMS),
    }
    with av.open(io.BytesIO(data), "r", format=demuxer, options=options) as container:
        if not container.streams.video:
            raise MediaError("the file holds no video stream")
        stream = container.streams.video[0]
        codec = stream.codec_context.codec.canonical_name if stream.codec_context is not None else "an unknown codec"
        if codec not in FILM_CODECS:
            raise MediaError(f"the film's pictures are written in {codec}; taken are {', '.join(FILM_CODECS)}")
        stream.codec_context.options = {"max_pixels": str(limits.max_pixels)}
        stream.thread_count = 1
        for other in container.streams:
            if other is not stream:
                other.discard = Discard.all
        yield container, stream


def measure_film(data: bytes, limits: MediaLimits) -> FilmFacts:
    """Size, length and number of frames of a film, checked against the limits.

    The frames are counted as they lie in the file, up to the limit, because a header may say anything.

    Raises:
        MediaError: no readable film, or beyond a limit.
    """
    import av

    film = sniff(data, "video")
    try:
        with open_film(data, limits) as (container, stream):
            width, height = stream.codec_context.width, stream.codec_context.height
            fps = float(stream.average_rate or 0) or None
            duration = container.duration / av.time_base if container.duration else None
            limits.check_seconds("video", duration or 0.0)
            limits.check_film(width, height, stream.frames, film.decoder == "gif")
            frames, seconds = _count(container, stream, limits)
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(f"not a readable video ({error})") from error
    limits.check_seconds("video", seconds)
    limits.check_film(width, height, frames, film.decoder == "gif")
    return FilmFacts(film, width, height, frames, duration, fps)


def _count(container: Any, stream: Any, limits: MediaLimits) -> tuple[int, float]:
    """Packets of pictures, at most one more than the limit, and seconds from the first to the last."""
    frames, first, last = 0, None, 0
    for packet in container.demux(stream):
        if packet.size == 0:
            continue  # the end
        frames += 1
        if packet.pts is not None:
            first = packet.pts if first is None else min(first, packet.pts)
            last = max(last, packet.pts)
        if frames > limits.max_frames:
            break
    return frames, float((last - (first or 0)) * (stream.time_base or 0))

"""The file formats that images, sounds and films may have, told by their first bytes before a decoder sees any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from relax_sdk.errors import MediaError

Kind = Literal["image", "audio", "video"]

NOUNS: dict[Kind, str] = {"image": "image", "audio": "sound", "video": "video"}
"""What messages call an item of each kind."""


@dataclass(frozen=True)
class MediaFormat:
    """A file format that is taken as an image, a sound or a film."""

    name: str
    """As people call it."""
    mime: str
    extension: str
    """File ending of the store's copy, with its dot."""
    decoder: str
    """The name under which its decoder knows it: Pillow's plugin, libsndfile's format, FFmpeg's demuxer."""
    begins: Callable[[bytes], bool]
    """Whether a file of this format begins with these bytes."""

    @property
    def kind(self) -> Kind:
        """`image`, `audio` or `video`."""
        return self.mime.split("/", 1)[0]  # type: ignore[return-value]


def _magic(*starts: bytes) -> Callable[[bytes], bool]:
    return lambda data: data.startswith(starts)


def _riff(form: bytes, *ids: bytes) -> Callable[[bytes], bool]:
    return lambda data: data.startswith(ids or (b"RIFF",)) and data[8:12] == form


def _mp3(data: bytes) -> bool:
    """An ID3 tag, or the header of an MPEG audio frame with a layer; ADTS, which has none, is AAC."""
    return data[:3] == b"ID3" or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0 and data[1] & 0x06 != 0)


def _mp4(data: bytes) -> bool:
    """A `ftyp` box of less than 64 KiB; so the file begins with a zero, and FFmpeg's demuxers of texts do not read on."""
    return data[4:8] == b"ftyp" and data[:2] == b"\0\0"


def _matroska(data: bytes) -> bool:
    """An EBML header that names its type: without one FFmpeg would have to guess."""
    return data[:4] == b"\x1a\x45\xdf\xa3" and any(name in data[:64] for name in (b"webm", b"matroska"))


FORMATS = (
    MediaFormat("PNG", "image/png", ".png", "PNG", _magic(b"\x89PNG\r\n\x1a\n")),
    MediaFormat("JPEG", "image/jpeg", ".jpg", "JPEG", _magic(b"\xff\xd8\xff")),
    MediaFormat("WebP", "image/webp", ".webp", "WEBP", _riff(b"WEBP")),
    MediaFormat("GIF", "image/gif", ".gif", "GIF", _magic(b"GIF87a", b"GIF89a")),
    MediaFormat("BMP", "image/bmp", ".bmp", "BMP", _magic(b"BM")),
    MediaFormat("TIFF", "image/tiff", ".tiff", "TIFF", _magic(b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
    MediaFormat("WAV", "audio/wav", ".wav", "WAV", _riff(b"WAVE", b"RIFF", b"RIFX")),
    MediaFormat("FLAC", "audio/flac", ".flac", "FLAC", _magic(b"fLaC")),
    MediaFormat("Ogg", "audio/ogg", ".ogg", "OGG", _magic(b"OggS")),
    MediaFormat("MP3", "audio/mpeg", ".mp3", "MP3", _mp3),
    MediaFormat("MP4", "video/mp4", ".mp4", "mov", _mp4),
    MediaFormat("WebM", "video/webm", ".webm", "matroska", _matroska),
    MediaFormat("AVI", "video/x-msvideo", ".avi", "avi", _riff(b"AVI ")),
    MediaFormat("GIF", "video/gif", ".gif", "gif", _magic(b"GIF87a", b"GIF89a")),
)
"""All formats that are taken; what is none of them is opened by no decoder."""

EXTENSIONS = {format.mime: format.extension for format in FORMATS}
"""File ending of the store's copy by MIME type."""

SOUND_ENCODINGS = frozenset(
    (
        *("PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW", "IMA_ADPCM", "MS_ADPCM"),
        *("VORBIS", "OPUS", "MPEG_LAYER_I", "MPEG_LAYER_II", "MPEG_LAYER_III"),
    )
)
"""How samples may be written, in libsndfile's words."""

FILM_CODECS = {
    "h264": ("h264",),
    "hevc": ("hevc",),
    "av1": ("libdav1d", "av1"),
    "vp8": ("vp8",),
    "vp9": ("vp9",),
    "mpeg4": ("mpeg4",),
    "mpeg2video": ("mpeg2video",),
    "mjpeg": ("mjpeg",),
    "gif": ("gif",),
}
"""How pictures of a film may be written, in FFmpeg's words, and FFmpeg's decoders of it."""


def sniff(data: bytes, kind: Kind) -> MediaFormat:
    """The format of an item by its first bytes.

    Raises:
        MediaError: it begins like none of the formats that are taken for this kind; the message names them.
    """
    taken = [format for format in FORMATS if format.kind == kind]
    for format in taken:
        if format.begins(data):
            return format
    names = ", ".join(format.name for format in taken)
    raise MediaError(f"not a readable {NOUNS[kind]}: its first bytes are of none of the formats that are taken ({names})")

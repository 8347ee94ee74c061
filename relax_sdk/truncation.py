"""Finds files that were cut short although decoders read them without complaint: WAV, Ogg, WebM."""

from __future__ import annotations

import struct

from relax_sdk.errors import MediaError

MAX_CHUNKS = 10_000
"""Chunks of a WAV file before its samples."""


def check_complete(data: bytes) -> None:
    """Compare what a WAV, Ogg or WebM/Matroska file says of its length with the bytes that are there.

    Other formats pass: their decoders notice. So do streams that state no length.

    Raises:
        MediaError: cut short; the message gives both lengths where the format states one.
    """
    if data[:4] in (b"RIFF", b"RIFX") and data[8:12] == b"WAVE":
        _check_wav(data, ">" if data[:4] == b"RIFX" else "<")
    elif data[:4] == b"OggS":
        _check_ogg(data)
    elif data[:4] == b"\x1a\x45\xdf\xa3":
        _check_matroska(data)


def _check_wav(data: bytes, order: str) -> None:
    """The `data` chunk must lie within the file; sizes of about 2 GiB and more are those of streams of unknown length."""
    at = 12
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(data):
            return
        name, size = struct.unpack_from(order + "4sI", data, at)
        if name == b"data":
            if size < 0x7FFF0000 and at + 8 + size > len(data):
                raise MediaError(f"truncated sound: {len(data) - at - 8:,} of {size:,} bytes of samples are there")
            return
        at += 8 + size + size % 2
    raise MediaError(f"damaged sound: more than {MAX_CHUNKS:,} chunks stand before its samples")


def _check_ogg(data: bytes) -> None:
    """The last page must be whole and carry the end-of-stream flag (RFC 3533 §6)."""
    at = data.rfind(b"OggS")
    header = data[at : at + 27]
    if len(header) < 27 or len(data) < at + 27 + header[26]:
        raise MediaError("truncated sound: its last Ogg page is cut off")
    end = at + 27 + header[26] + sum(data[at + 27 : at + 27 + header[26]])
    if end > len(data):
        raise MediaError(f"truncated sound: its last Ogg page is cut off, {end - len(data):,} bytes are missing")
    if not header[5] & 4:
        raise MediaError("truncated sound: the Ogg stream has no end")


def _check_matroska(data: bytes) -> None:
    """The Segment must lie within the file unless its size is unknown, all ones (RFC 8794 §6)."""
    at, header_size = _vint(data, 4)
    at += header_size or 0
    if data[at : at + 4] != b"\x18\x53\x80\x67":
        return
    at, size = _vint(data, at + 4)
    if size is not None and at + size > len(data):
        raise MediaError(f"truncated video: {len(data) - at:,} of {size:,} bytes of its segment are there")


def _vint(data: bytes, at: int) -> tuple[int, int | None]:
    """A variable-size integer: where it ends, and its value, None if unknown or beyond the file."""
    if at >= len(data) or data[at] == 0:
        return at, None
    width = 9 - data[at].bit_length()
    raw = int.from_bytes(data[at : at + width], "big") & ((1 << (7 * width)) - 1)
    return at + width, None if raw == (1 << (7 * width)) - 1 else raw

"""Messages over a stream of bytes: four bytes of length, then the message."""

from __future__ import annotations

import asyncio
import struct

_LENGTH = struct.Struct("<I")
MAX_FRAME = 256 << 20
"""Bytes."""


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next message; None: the other side is gone, or has broken the form."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(length) if length <= MAX_FRAME else None
    except (asyncio.IncompleteReadError, OSError):
        return None


def frame(data: bytes) -> bytes:
    """A message with its length.

    Raises:
        OverflowError: too long.
    """
    if len(data) > MAX_FRAME:
        raise OverflowError(f"a message of {len(data)} bytes; allowed: {MAX_FRAME}")
    return _LENGTH.pack(len(data)) + data

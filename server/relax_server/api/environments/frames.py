"""Messages over a stream of bytes: four bytes of length, then the message."""

from __future__ import annotations

import asyncio
import struct

_LENGTH = struct.Struct("<I")
TO_WORKER, FROM_WORKER = 256 << 20, 64 << 20
"""Bytes of a message: trajectories that are scored go to a worker, and what comes from one is held in the service's memory."""


async def read_frame(reader: asyncio.StreamReader, limit: int) -> bytes | None:
    """The next message; None: the other side is gone, or has broken the form, or the message has more bytes than the limit."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(length) if length <= limit else None
    except (asyncio.IncompleteReadError, OSError):
        return None


def frame(data: bytes, limit: int) -> bytes:
    """A message with its length.

    Raises:
        OverflowError: too long.
    """
    if len(data) > limit:
        raise OverflowError(f"a message of {len(data)} bytes; allowed: {limit}")
    return _LENGTH.pack(len(data)) + data

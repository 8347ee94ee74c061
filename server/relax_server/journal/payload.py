"""A group as the bytes of one row: checksummed, and compressed where that pays."""

from __future__ import annotations

import struct
import zlib

from relax_sdk.errors import JournalError, UnstorableError
from relax_sdk.storable import check_storable
from relax_sdk.trajectory import Group, decode_group, encode_group

_HEADER = struct.Struct("<BI")
"""Codec, CRC-32 of the body as stored."""
_RAW, _ZLIB = 0, 1

PROBE_BYTES = 65_536
"""Bytes at the start that decide whether to compress."""
WORTH = 0.6
"""Compress when the start shrinks to this share or less.

Measured with zlib level 1 on groups of 16: one long turn shrinks to 0.83 and costs more time than writing the rest;
eight turns (each prompt repeats the history) and routed experts shrink to 0.37.
"""


def pack(group: Group) -> bytes:
    """A group as bytes.

    Raises:
        UnstorableError: it holds a value that has no form as bytes.
    """
    try:
        body, codec = encode_group(group), _RAW
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _unstorable(group, error) from error
    start = body[:PROBE_BYTES]
    if len(zlib.compress(start, 1)) <= WORTH * len(start):
        body, codec = zlib.compress(body, 1), _ZLIB
    return _HEADER.pack(codec, zlib.crc32(body)) + body


def _unstorable(group: Group, error: Exception) -> UnstorableError:
    """The error that names the value which could not be encoded, where it is in a field that others than Relax Gym fill."""
    for t in group.trajectories:
        for name in ("info", "messages", "rewards", "error"):
            try:
                check_storable(getattr(t, name), name)
            except UnstorableError as found:
                return UnstorableError(f"trajectory {t.id!r} cannot be stored: {found}", found.field)
    return UnstorableError(f"group {group.id!r} cannot be stored ({type(error).__name__}: {error})")


def unpack(data: bytes, group_id: str) -> Group:
    """Read back what `pack` wrote.

    Raises:
        JournalError: the bytes changed since, or were written by a newer version.
    """
    body = memoryview(data)[_HEADER.size :]
    codec, checksum = _HEADER.unpack_from(data) if len(data) >= _HEADER.size else (_RAW, -1)
    if zlib.crc32(body) != checksum:
        raise JournalError(
            f"group {group_id!r} is damaged in the journal (its checksum differs): check the disk, restore the file from a copy"
        )
    if codec not in (_RAW, _ZLIB):
        raise JournalError(f"group {group_id!r} is stored in form {codec}, unknown to this version of Relax Gym: upgrade it")
    return decode_group(zlib.decompress(body) if codec == _ZLIB else bytes(body))

"""Compresses the bodies of answers."""

from __future__ import annotations

import zlib

LEAST = 2048
"""Bytes of an answer that is worth compressing."""


def pack(body: bytes, zipped: bool, level: int = 1) -> tuple[bytes, dict[str, str]]:
    """A body and the headers that say how it is sent.

    Args:
        body: as it is.
        zipped: whether the caller takes gzip.
        level: 1, the fastest, to 9, the smallest.
    """
    headers = {"Vary": "Accept-Encoding"}
    if not zipped or len(body) < LEAST:
        return body, headers
    packer = zlib.compressobj(level, wbits=31)  # with the header of gzip
    return packer.compress(body) + packer.flush(), headers | {"Content-Encoding": "gzip"}

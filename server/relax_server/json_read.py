"""Reading JSON that holds long base64 texts, such as media or routes, without holding Python's lock for as long as they are."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson

LONG = 8 << 10
"""Bytes of a text that is cut out before the rest is parsed."""
LARGE = 64 << 10
"""Bytes of a JSON text in which such texts are looked for."""
SLICE = 1 << 20
"""Bytes that are looked at together."""
DIGITS = 6
"""Digits that hold the number of a text that was cut out."""
HEAD = 128
"""First bytes of a text, which may be those of a data URI."""


def _table(characters: bytes) -> np.ndarray:
    table = np.zeros(256, bool)
    table[np.frombuffer(characters, np.uint8)] = True
    return table


_BASE64 = _table(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_")
_URI = _BASE64 | _table(b":;,.")


class MuchJson(ValueError):
    """A JSON text has more than may be parsed at once. `size` has its bytes without long base64 texts."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} bytes of JSON without its long base64 texts")
        self.size = size


def loads(raw: bytes, most: int | None = None) -> Any:
    """The value of a JSON text, as `orjson.loads` gives it.

    Args:
        raw: the text.
        most: bytes that are parsed at most, which nothing can interrupt: all but long base64 texts.

    Raises:
        orjson.JSONDecodeError: it is none, or has a number of more than 8 KiB.
        MuchJson: it has more than `most` bytes.
    """
    cuts = list(_long_texts(raw)) if len(raw) > LARGE else []
    size = len(raw) - sum(cut.stop - cut.start for cut in cuts)
    if most is not None and size > most:
        raise MuchJson(size)
    if not cuts:
        return orjson.loads(raw)
    mark, pieces, at = secrets.token_hex(16), [], 0
    for number, cut in enumerate(cuts):
        pieces += [raw[at : cut.start], f"{mark}{number:0{DIGITS}}".encode()]
        at = cut.stop
    value = [orjson.loads(b"".join((*pieces, raw[at:])))]
    _put_back(value, mark, [memoryview(raw)[cut] for cut in cuts])
    return value[0]


def _long_texts(raw: bytes) -> Iterator[slice]:
    """Where long texts of base64 stand between two quotes."""
    array, last = np.frombuffer(raw, np.uint8), -1
    for start in range(0, len(array), SLICE):
        quotes = np.flatnonzero(array[start : start + SLICE] == ord('"')) + start
        if last >= 0:
            quotes = np.concatenate([[last], quotes])
        for i in np.flatnonzero(np.diff(quotes) > LONG):
            place = slice(int(quotes[i]) + 1, int(quotes[i + 1]))
            if _is_base64(array[place]):
                yield place
        if len(quotes):
            last = int(quotes[-1])


def _is_base64(text: np.ndarray) -> bool:
    rest = (text[start : start + SLICE] for start in range(HEAD, len(text), SLICE))
    return bool(_URI[text[:HEAD]].all()) and all(bool(_BASE64[part].all()) for part in rest)


def _put_back(value: list[Any], mark: str, texts: list[memoryview]) -> None:
    """Put texts where their names stand: alone, in other texts, or in keys."""

    def whole(text: str) -> str:
        first, *rest = text.split(mark)
        parts = [first]
        for part in rest:
            parts += [str(texts[int(part[:DIGITS])], "ascii"), part[DIGITS:]]
        return "".join(part for part in parts if part) if len(parts) > 1 else text

    level: list[Any] = [value]
    while level:
        outer = level.pop()
        if type(outer) is dict and mark in "".join(outer):
            renamed = {whole(key): inner for key, inner in outer.items()}
            outer.clear()
            outer.update(renamed)
        for key, inner in outer.items() if type(outer) is dict else enumerate(outer):
            if type(inner) is str and mark in inner:
                outer[key] = whole(inner)
            elif type(inner) in (dict, list):
                level.append(inner)

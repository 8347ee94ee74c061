"""What can be stored and told again: a check for what a caller brings, and the nearest such value where nobody can be asked.

Values end as MessagePack, as JSON and as text in columns of SQLite and PostgreSQL. What all of these hold: None, booleans,
integers of 64 bits, finite floats, text without lone surrogates, and lists and objects of these, not too deep. A column of text
in PostgreSQL holds no NUL either, so names hold none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from relax_sdk.errors import UnstorableError

MAX_DEPTH = 64
"""Lists and objects inside one another. What encodes and decodes them on the way goes deeper; orjson the least, to 254."""
LEAST, MOST = -(2**63), 2**63 - 1
PATH_CHARACTERS = 200
"""Characters of a field's name in an error, at most."""


def check_storable(value: Any, field: str, any_number: bool = False) -> None:
    """Refuse a value that cannot be stored as it is.

    Args:
        value: as JSON gives it.
        field: its name for whoever sent it; what lies inside is named behind it, as in `metadata.tags.3`.
        any_number: whether numbers may be of any size, as where a value is kept as the text of its JSON.

    Raises:
        UnstorableError: something in it has no form in which it can be stored; its `field` is the innermost name.
    """
    found = _flaw(value, 0, any_number)
    if found is not None:
        path, what = found
        place = (field + path if field else path.removeprefix("."))[:PATH_CHARACTERS]
        raise UnstorableError(f"{place or 'the value'} {what}", place)


def check_name(name: str, field: str) -> None:
    """Refuse text that cannot stand in a column of every database.

    Raises:
        UnstorableError: a lone surrogate, or a NUL character.
    """
    what = flaw_of_text(name) or ("holds a NUL character; leave it out" if "\0" in name else None)
    if what is not None:
        raise UnstorableError(f"{field} {what}", field)


def flaw_of_text(text: str) -> str | None:
    """What keeps a text from being encoded, for the end of a sentence that names it; None: nothing does."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"holds half of a surrogate pair (U+{ord(text[error.start]):04X}), which is no text, at character {error.start}"
    return None


def storable_text(text: str) -> str:
    """The nearest text that can be encoded: lone surrogates become U+FFFD."""
    if flaw_of_text(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def storable(value: Any) -> Any:
    """The nearest value that can be stored and told as JSON; one that can be is equal to it.

    Text loses lone surrogates, integers of more than 64 bits become text, floats that are not finite None, arrays lists; what
    lies deeper than `MAX_DEPTH`, or is no plain data, becomes a text that shows it.
    """
    return _nearest(value, 0)


def _flaw(value: Any, depth: int, any_number: bool) -> tuple[str, str] | None:
    """Where in a value something cannot be stored, and what is wrong with it."""
    if isinstance(value, str):
        what = flaw_of_text(value)
        return ("", what) if what is not None else None
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, int):
        return None if any_number or LEAST <= value <= MOST else ("", "is an integer of more than 64 bits; send it as text")
    if isinstance(value, float):
        return None if any_number or math.isfinite(value) else ("", f"is {value}; numbers must be finite")
    if not isinstance(value, (Mapping, list, tuple)):
        return "", f"is of type {type(value).__name__}, which JSON does not have"
    if depth >= MAX_DEPTH:
        return "", f"has more than {MAX_DEPTH} lists and objects inside one another"
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in items:
        if not isinstance(key, (str, int)):
            return "", f"has a name of type {type(key).__name__}; names are text"
        if isinstance(key, str) and (what := flaw_of_text(key)) is not None:
            return f".{storable_text(key)}", f"has a name that {what}"
        found = _flaw(item, depth + 1, any_number)
        if found is not None:
            return f".{key}{found[0]}", found[1]
    return None


def _nearest(value: Any, depth: int) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return storable_text(str(value))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if LEAST <= value <= MOST else _shown(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, (Mapping, list, tuple, set, frozenset)) or depth >= MAX_DEPTH:
        return _shown(value)
    if isinstance(value, Mapping):
        return {_shown(key): _nearest(item, depth + 1) for key, item in value.items()}
    return [_nearest(item, depth + 1) for item in value]


def _shown(value: Any) -> str:
    """Any value as a text."""
    if isinstance(value, (Mapping, list, set, frozenset)):
        return "…"
    try:
        return storable_text(hex(value) if isinstance(value, int) and value.bit_length() > 10_000 else str(value))
    except Exception:  # of a class whose str() fails
        return f"<{type(value).__name__}>"

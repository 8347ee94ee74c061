"""Any value as JSON that every reader understands, whatever an environment or an older version has put into it."""

from __future__ import annotations

from typing import Any

import orjson

from relax_sdk.storable import storable

_LENIENT = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def as_json(value: Any) -> bytes:
    """A value as JSON.

    Floats that are not finite become null, arrays lists, and other objects their text; where that is not enough, as with lone
    surrogates, integers of more than 64 bits or deep nesting, the nearest value that `storable` finds takes its place.
    """
    try:
        return orjson.dumps(value)
    except TypeError:  # not plain data; orjson's errors are TypeErrors
        pass
    try:
        return orjson.dumps(value, default=str, option=_LENIENT)
    except TypeError:
        return orjson.dumps(storable(value))


def json_text(value: Any) -> str:
    """`as_json` as text, for columns of JSON: PostgreSQL takes no NaN, and what is stored must be told again."""
    return as_json(value).decode()

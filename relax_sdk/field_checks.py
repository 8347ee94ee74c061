"""Checks of the fields of configuration dataclasses: types, choices and ranges, with errors that name what is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal, get_args, get_origin, get_type_hints

from relax_sdk.errors import ConfigError


def require(ok: bool, owner: object, name: str, allowed: str) -> None:
    """Raise `ConfigError` that names the field, its value and what is allowed, unless `ok`."""
    if not ok:
        raise ConfigError(f"{type(owner).__name__}.{name} = {getattr(owner, name)!r}; allowed: {allowed}")


_hints = cache(get_type_hints)


def check_types(owner: object) -> None:
    """Compare every plain field with its annotation: numbers, words, choices, lists of token ids, `None` where allowed.

    Lists become tuples, as YAML and JSON know no others.

    Raises:
        ConfigError: a value of another type; NaN; a word that is not among the choices.
    """
    for name, kind in _hints(type(owner)).items():
        value = getattr(owner, name)
        if kind in (tuple[int, ...], tuple[str, ...]):
            (item_kind, _), is_text = get_args(kind), isinstance(value, str)
            ok = isinstance(value, Sequence) and not is_text and all(type(item) is item_kind for item in value)
            require(ok, owner, name, "a list of integers" if item_kind is int else "a list of texts")
            object.__setattr__(owner, name, tuple(value))
        elif get_origin(kind) is Literal:
            require(value in get_args(kind), owner, name, ", ".join(map(str, get_args(kind))))
        elif value is None and type(None) in get_args(kind):
            continue
        elif words := [word for part in get_args(kind) if get_origin(part) is Literal for word in get_args(part)]:
            allowed = ["true", "false"] if bool in get_args(kind) else []
            ok = type(value) in get_args(kind) or value in words
            require(ok, owner, name, ", ".join([*allowed, *map(str, words)]))
        elif int in (kind, *get_args(kind)):
            require(type(value) is int, owner, name, "an integer")
        elif float in (kind, *get_args(kind)):
            require(
                isinstance(value, (int, float)) and type(value) is not bool and not math.isnan(value), owner, name, "a number"
            )
        elif kind in (bool, str):
            require(type(value) is kind, owner, name, "true or false" if kind is bool else "text")

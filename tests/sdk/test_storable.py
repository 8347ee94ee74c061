"""What cannot be stored is refused with its field's name, or told in the nearest form that can be."""

from __future__ import annotations

import json
import math
import string
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import relax_sdk as relax
from relax_sdk.errors import EnvError, UnstorableError
from relax_sdk.storable import MAX_DEPTH, check_name, check_storable, storable
from relax_sdk.validation import plain_data


def nested(depth: int) -> Any:
    value: Any = "the innermost"
    for _ in range(depth):
        value = [value]
    return value


class Mute:
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "field", "says"),
    [
        ({"note": "\ud800"}, "metadata.note", "half of a surrogate pair"),
        ({"tags": ["a", "b", "\udfff"]}, "metadata.tags.2", "half of a surrogate pair"),
        ({"\ud800": 1}, "metadata.\ufffd", "name"),
        ({"n": 2**63}, "metadata.n", "64 bits"),
        ({"n": -(2**63) - 1}, "metadata.n", "64 bits"),
        ({"x": math.nan}, "metadata.x", "nan"),
        ({"x": math.inf}, "metadata.x", "inf"),
        ({"x": b"bytes"}, "metadata.x", "bytes"),
        (nested(MAX_DEPTH + 1), "metadata" + ".0" * MAX_DEPTH, str(MAX_DEPTH)),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_field(value: Any, field: str, says: str) -> None:
    with pytest.raises(UnstorableError, match=says) as caught:
        check_storable(value, "metadata")
    assert caught.value.field == field and str(caught.value).startswith(field)
    str(caught.value).encode()


def test_names_hold_no_nul_and_other_text_may() -> None:
    check_storable({"text": "a\0b"}, "metadata")
    with pytest.raises(UnstorableError, match="NUL"):
        check_name("a\0b", "env")


_leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(max_size=5)
_leaves |= (
    st.builds(lambda: 10**6000)
    | st.builds(Mute)
    | st.just(np.arange(3))
    | st.just(np.float32("nan"))
    | st.builds(nested, st.just(2000))
)
_anything = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters()) | st.integers(), inner, max_size=4),
    max_leaves=20,
)


@given(_anything)
def test_the_nearest_value_can_be_stored_and_told_in_every_form(value: Any) -> None:
    near = storable(value)
    check_storable(near, "value")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(near)) == near
    assert json.loads(json.dumps(near, allow_nan=False)) == orjson.loads(orjson.dumps(near)) == near


_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(string.printable), inner, max_size=4),
    max_leaves=20,
)


@given(_plain)
def test_what_can_be_stored_is_left_as_it_is(value: Any) -> None:
    check_storable(value, "value")
    assert storable(value) == value


def test_messages_and_infos_hold_nothing_that_cannot_be_stored() -> None:
    for make in (
        lambda: relax.Text("\ud800"),
        lambda: relax.Message.from_openai({"role": "user", "content": "\ud800"}),
        lambda: relax.Message.from_openai({"role": "tool", "content": "x", "tool_call_id": "\ud800"}),
        lambda: relax.Message.from_openai({"role": "tool", "content": "x", "tool_call_id": {}}),
    ):
        with pytest.raises(EnvError):
            make()
    for arguments in (r'{"x": "\ud800"}', '{"x": ' + "[" * 80 + "]" * 80 + "}"):
        call = {"id": "c", "type": "function", "function": {"name": "guess", "arguments": arguments}}
        (read,) = relax.Message.from_openai({"role": "assistant", "content": "", "tool_calls": [call]}).tool_calls
        assert read.error is not None and "guess" in read.error and read.arguments == {}
    assert plain_data({"\ud800": "\udc00", "n": 2**64}) == {"\ufffd": "\ufffd"}

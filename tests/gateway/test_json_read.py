"""JSON with long texts is read as all JSON is, and no long text is parsed together with the rest."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import orjson
import pytest
from relax_server import json_read

from relax_sdk.errors import MediaError
from relax_sdk.media_places import SLICE, read_base64, read_data_uri

LONG = "iVBORw0KGgo" * 10_000
URI = "data:image/png;base64," + LONG
TEXTS: dict[str, bytes] = {
    "a text alone": b'"%b"' % LONG.encode(),
    "a key": b'{"%b": 1}' % LONG.encode(),
    "after an escaped quote": b'["\\"%b", "%b"]' % (LONG.encode(), LONG.encode()),
    "before an escaped quote": b'["%b\\"", {"a": "%b"}]' % (LONG.encode(), LONG.encode()),
    "given twice": b'{"a": "%b", "a": "%b"}' % (URI.encode(), LONG.encode()),
    "given to two": b'{"a": "%b", "b": ["%b"]}' % (URI.encode(), URI.encode()),
    "escapes in it": b'["%b\\n%b"]' % (LONG.encode(), LONG.encode()),
    "other characters in it": json.dumps([LONG + "é" + LONG], ensure_ascii=False).encode(),
    "two in one text": b'["<\\"%b\\">%b\\"", 1]' % (LONG.encode(), URI.encode()),
    "two keys that are one": b'{"%b": 1, "%b": 2, "x": 3}' % (LONG.encode(), LONG.encode()),
    "blanks": b'["a",%b"b"]' % (b" " * 100_000),
    "no JSON outside": b'["a"%b"b"]' % LONG.encode(),
    "no end": b'["%b' % LONG.encode(),
    "an end too many": b'["%b"]]' % LONG.encode(),
    "a control character": b'["%b\n%b"]' % (LONG.encode(), LONG.encode()),
}


def told(read: Any, raw: bytes) -> Any:
    try:
        return read(raw)
    except orjson.JSONDecodeError:
        return "no JSON"


@pytest.mark.parametrize("name", TEXTS)
def test_long_texts_are_read_wherever_they_stand(name: str) -> None:
    assert told(json_read.loads, TEXTS[name]) == told(orjson.loads, TEXTS[name])


def test_values_of_all_shapes_are_read_as_by_orjson() -> None:
    chance = random.Random(0)

    def value(depth: int) -> Any:
        kind = chance.randrange(7 if depth else 5)
        if kind >= 5:
            inner = [value(depth - 1) for _ in range(chance.randrange(4))]
            return inner if kind == 5 else {(LONG[: chance.randrange(5)] + str(i)): one for i, one in enumerate(inner)}
        return [LONG, URI, '"' + LONG, 1.5, LONG[: chance.randrange(100)]][kind]

    for _ in range(100):
        raw = json.dumps(value(4)).encode()
        assert json_read.loads(raw) == orjson.loads(raw)


def test_long_texts_are_not_parsed_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser of one large body held Python's lock for a tenth of a second, and all threads waited."""
    sizes, parse = list[int](), orjson.loads
    monkeypatch.setattr(json_read.orjson, "loads", lambda raw: sizes.append(len(raw)) or parse(raw))
    part = {"type": "image_url", "image_url": {"url": URI}}
    body = {"messages": [{"role": "user", "content": [part, part]}], "routes": LONG}
    assert json_read.loads(json.dumps(body).encode()) == body
    assert json_read.loads(TEXTS["after an escaped quote"]) == ['"' + LONG, LONG]
    with pytest.raises(orjson.JSONDecodeError):
        json_read.loads(TEXTS["no JSON outside"])
    assert len(sizes) == 3 and max(sizes) < 1000


@pytest.mark.parametrize("size", [0, 1, 2, 3, SLICE * 3 // 4 - 1, SLICE * 3 // 4, SLICE * 3 // 4 + 1, 2 * SLICE])
def test_base64_is_read_in_slices(size: int) -> None:
    data = random.Random(size).randbytes(size)
    text = base64.b64encode(data).decode()
    assert read_base64(text) == read_data_uri(f"data:x/y;base64,{text}") == data


@pytest.mark.parametrize("where", [3, SLICE - 1, SLICE + 3, 2 * SLICE])
@pytest.mark.parametrize("wrong", ["=", "%", "é", "A="])
def test_what_is_not_base64_is_refused_in_every_slice(where: int, wrong: str) -> None:
    text = "A" * where + wrong + "A" * (3 * SLICE - where)
    with pytest.raises(MediaError, match="not valid base64"):
        read_base64(text)


def test_padding_between_slices_is_refused() -> None:
    with pytest.raises(MediaError, match="not valid base64"):
        read_base64("A" * (SLICE - 1) + "=" + "AAAA")
    with pytest.raises(MediaError, match="must read data:"):
        read_data_uri("data:image/png,AAAA")

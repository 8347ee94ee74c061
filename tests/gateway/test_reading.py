"""Requests are bounded in each of their parts, and large ones are read outside of the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from relax_server.gateway import reading
from relax_server.gateway.errors import ApiError
from relax_server.gateway.reading import Parsed, parse, parsed, understand, weight
from relax_server.rollout.fair_threads import SMALL, FairThreads, KeyThreads

from relax_sdk.config import SamplingParams

SAID = {"role": "user", "content": "x"}
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture
async def work() -> AsyncIterator[KeyThreads]:
    threads = FairThreads("test")
    yield threads.of("key")
    threads.close()


class Session:
    """As much of a session as reading needs."""

    def __init__(self, work: KeyThreads) -> None:
        self.work, self.sampling = work, SamplingParams()


async def read(body: Any, work: KeyThreads, field: str = "messages") -> bool:
    """Read a body; returns whether that was done in the event loop's thread."""
    loop = threading.get_ident()

    def here(value: Any, *others: Any) -> bool:
        assert value == body
        return threading.get_ident() == loop

    found = await parse(orjson.dumps(body), work)
    return await understand(None, Session(work), found, field, here)  # type: ignore[arg-type]


async def test_only_small_requests_are_read_in_the_loop(work: KeyThreads) -> None:
    assert await read({"messages": [SAID] * 10}, work) is True
    assert await read({"messages": [SAID] * 1000}, work) is False
    assert await read({"messages": [SAID | {"content": "x" * SMALL}]}, work) is False
    assert await read({"input": "x" * SMALL}, work, "input") is False
    assert await read({"messages": [SAID], "metadata": {"x": "y" * SMALL}}, work) is False


async def test_parsing_a_large_body_is_no_work_of_the_loop(work: KeyThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(reading, "_deep", lambda value: seen.append(threading.get_ident()))
    await parse(b"[" + b"1," * SMALL + b"1]", work)
    await parse(b"[" + b"[1]," * 100 + b"1]", work)
    assert seen[0] != threading.get_ident() == seen[1]


@pytest.mark.parametrize(
    "body, says",
    [
        ({"messages": [SAID] * 10_001}, "messages has 10001 items; allowed: 10000"),
        ({"messages": [SAID | {"content": [{"type": "text", "text": "a"}] * 10_001}]}, "are 10001; allowed: 10000"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALLED] * 10_001}]}, "are 10001; allowed: 10000"),
        (
            {"messages": [SAID | {"content": [{"type": "image_url", "image_url": {"url": "relax-media:0"}}] * 1001}]},
            "its media are 1001; allowed: 1000",
        ),
        ({"messages": [SAID], "tools": [{"type": "function"}] * 1001}, "tools has 1001 items; allowed: 1000"),
        ({"messages": [SAID | {"content": "x" * (8 << 20)}]}, "besides media are 83886.*; allowed: 8388608"),
        ({"messages": [SAID], "metadata": {"x": "y" * (9 << 20)}}, "besides media are 94.*; allowed: 8388608"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": " " * (1 << 21)}}]}]},
            "arguments are 2097152; allowed: 1048576",
        ),
    ],
)
async def test_every_part_has_a_bound_that_is_told_before_it_is_read(body: Any, says: str, work: KeyThreads) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        await read(body, work)
    assert caught.value.status == 400


async def test_what_is_no_media_is_bounded_before_it_is_parsed(work: KeyThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_server.gateway.reading.MOST_JSON", 1 << 20)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * 1000}}
    body = {"messages": [SAID | {"content": [image] * 200}]}
    assert (await parse(json.dumps(body).encode(), work)).value == body
    with pytest.raises(ApiError, match="besides long texts of base64; allowed: 1048576") as caught:
        await parse(json.dumps({"messages": [SAID | {"content": "a b " * 100}] * 2500}).encode(), work)
    assert caught.value.status == 413


async def test_the_responses_api_has_the_same_bounds(work: KeyThreads) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": " " * (1 << 21)}
    with pytest.raises(ApiError, match="arguments are 2097152"):
        await read({"input": [call]}, work, "input")
    with pytest.raises(ApiError, match="input has 10001 items"):
        await read({"input": [SAID] * 10_001}, work, "input")


async def test_media_do_not_count_as_text(work: KeyThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    async def taken(*conversation: Any) -> dict[Any, Any]:
        return {}

    monkeypatch.setattr(reading, "known_media", taken)
    data = "A" * (12 << 20)
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    sound = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    assert await read({"messages": [SAID | {"content": [image, sound]}]}, work) is False
    responses = {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
    assert await read({"input": [{"role": "user", "content": [responses]}]}, work, "input") is False


@pytest.mark.parametrize(
    "raw, says",
    [
        (b"[" + b"[]," * 60_000 + b"1]", "60001 opening brackets; allowed: 50000"),
        (b"[" + b"1," * 600_000 + b"1]", "600000 commas and colons; allowed: 500000"),
        (b'"' + b"\\n" * (9 << 20) + b'"', "9437184 bytes of text that is escaped or not ASCII"),
        ('"' + "é" * (5 << 20) + '"', "10485760 bytes of text that is escaped or not ASCII"),
    ],
    ids=["brackets", "commas", "escapes", "not_ascii"],
)
def test_what_takes_long_to_parse_is_not_parsed(raw: bytes | str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "orjson", None)
    with pytest.raises(ApiError, match=says) as caught:
        parsed(raw)
    assert caught.value.status == 413


@pytest.mark.parametrize("opening, closing", [(b"[", b"]"), (b'{"a": ', b"}")])
@pytest.mark.parametrize("pad", [0, SMALL])
def test_depth_has_a_bound(opening: bytes, closing: bytes, pad: int) -> None:
    def nested(depth: int) -> bytes:
        return opening * depth + b"1" + closing * depth + b" " * pad

    assert isinstance(parsed(nested(64)), Parsed)
    for depth in (65, 66, 500):
        with pytest.raises(ApiError, match="nests more than 64"):
            parsed(nested(depth))
    with pytest.raises(ApiError):
        parsed(nested(100_000))


def test_an_action_is_as_heavy_as_what_it_holds() -> None:
    assert weight({"content": "left"}) < SMALL
    for action in (
        {"content": "x" * SMALL},
        {"content": [{"type": "text", "text": "x" * SMALL}]},
        {"content": [{"type": "text"}] * SMALL},
        {"tool_calls": [{"function": {"name": "f", "arguments": "x" * SMALL}}]},
        {"tool_calls": [CALLED] * SMALL},
        {"content": [{"type": "image_url", "image_url": {"url": "data:" + "x" * SMALL}}]},
    ):
        assert weight(action) > SMALL, action
    for odd in ({}, {"content": 3, "tool_calls": "x"}, {"content": [3], "tool_calls": [3]}):
        assert weight(odd) < SMALL


async def test_much_at_once_is_all_read(work: KeyThreads) -> None:
    assert set(await asyncio.gather(*(read({"messages": [SAID] * 500}, work) for _ in range(50)))) == {False}

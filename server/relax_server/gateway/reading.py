"""Reading requests: small ones in the event loop, all others in threads that the keys share; none without a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import orjson

from relax_sdk.config import SamplingParams
from relax_sdk.media import MediaKey, MediaRef
from relax_sdk.media_places import MEDIA_SCHEME
from relax_sdk.storable import MAX_DEPTH
from relax_server.gateway.errors import ApiError, bad
from relax_server.gateway.media import known_media
from relax_server.gateway.played import PlayedSession, Surroundings
from relax_server.json_read import MuchJson, loads
from relax_server.rollout.fair_threads import MESSAGE, SMALL, KeyThreads

DEPTH = MAX_DEPTH
"""Lists and objects inside each other."""
MOST_MESSAGES, MOST_PARTS, MOST_MEDIA, MOST_TOOLS = 10_000, 10_000, 1_000, 1_000
"""Parts that one request may have; tool calls count as parts."""
MOST_TEXT, MOST_ARGUMENTS = 8 << 20, 1 << 20
"""Bytes of a request without its media, and characters of the arguments of its tool calls."""
MOST_JSON = 16 << 20
"""Bytes of a body without long texts of base64: its text, and media that are too short to be cut out."""
WEIGHED = 128 << 10
"""Bytes of a body whose parts are counted before it is parsed, as that cannot be interrupted."""
MOST_VALUES, MOST_CONTAINERS = 500_000, 50_000
"""Commas and colons of a body, and its opening brackets: what parsing takes its time for."""
SLICE = 1 << 20
_MARKS = (MEDIA_SCHEME.encode(), b"data:", b"input_audio", b"\\u")
"""A body without these holds no media; the last one begins characters that are written as numbers, as any may be."""
_URLS = ("image_url", "audio_url", "video_url")

C = TypeVar("C")


@dataclass(frozen=True)
class Parsed:
    """A request's body as JSON."""

    value: Any
    size: int
    """Bytes."""
    media: bool
    """Whether it may name or hold media."""


async def parse(raw: bytes | str, work: KeyThreads) -> Parsed:
    """A body as JSON.

    Args:
        raw: the body, or a message of a WebSocket.
        work: threads of whoever sent it.

    Raises:
        ApiError: not JSON, too deep, too large, or of too many parts.
        ServiceUnavailable: too much of the key's work waits already.
    """
    if len(raw) <= SMALL:
        return parsed(raw)
    return await work.call(len(raw), parsed, raw)


def parsed(raw: bytes | str) -> Parsed:
    """`parse`, in this thread."""
    body = raw.encode() if isinstance(raw, str) else raw
    if len(body) > WEIGHED:
        _require_light(body)
    try:
        value = loads(body, MOST_JSON)
    except MuchJson as error:
        what = f"the body of {len(body)} bytes has {error.size} besides long texts of base64; allowed: {MOST_JSON}"
        raise ApiError(413, what, "too_large") from error
    except orjson.JSONDecodeError as error:
        raise bad(f"the body is not JSON: {error}", code="invalid_json") from error
    if (len(body) > SMALL or body.count(b"[") + body.count(b"{") > DEPTH) and _deep(value):
        raise bad(f"the body nests more than {DEPTH} lists and objects inside each other", code="too_deep")
    return Parsed(value, len(body), len(body) > WEIGHED or _may_hold_media(body))


def _may_hold_media(body: bytes) -> bool:
    for mark in _MARKS:  # noqa: SIM110 - each model call comes here, and a generator costs more than the looks themselves
        if mark in body:
            return True
    return False


async def understand(
    around: Surroundings,
    session: PlayedSession,
    body: Parsed,
    field: str,
    read: Callable[[Any, SamplingParams, dict[MediaKey, MediaRef], PlayedSession], C],
) -> C:
    """A request for an answer of the model, read.

    Args:
        around: where stored media are found.
        session: whose it is.
        body: the request.
        field: its field that holds the conversation.
        read: reads it, given the media that it names.

    Raises:
        ApiError: too large in one of its parts, or what `read` raises.
        ServiceUnavailable: too much of the key's work waits already.
    """
    value, base, work = body.value, session.sampling, session.work
    if body.size <= SMALL:
        media = await known_media(around, session, value.get(field)) if body.media and isinstance(value, dict) else {}
        return read(value, base, media, session)
    if not body.media:
        return await work.call(body.size, lambda: read(_bounded(body, field), base, {}, session))
    await work.call(body.size, _bounded, body, field)
    media = await known_media(around, session, value.get(field)) if isinstance(value, dict) else {}
    return await work.call(body.size, read, value, base, media, session)


# ---------------------------------------------------------------------------------------------------------------- bounds


def _require_light(body: bytes) -> None:
    """Raise if a body takes long to parse: for its values, or for bytes of text that must be looked at one by one.

    Raises:
        ApiError: with both numbers.
    """
    array, counts = np.frombuffer(body, np.uint8), [0, 0, 0]
    for start in range(0, len(array), SLICE):
        part = array[start : start + SLICE]
        for i, marks in enumerate((b",:", b"[{", b"\\")):
            counts[i] += sum(int(np.count_nonzero(part == mark)) for mark in marks)
        counts[2] += int(np.count_nonzero(part >= 0x80))
    for count, most, what in zip(
        counts,
        (MOST_VALUES, MOST_CONTAINERS, MOST_TEXT),
        ("commas and colons", "opening brackets", "bytes of text that is escaped or not ASCII"),
        strict=True,
    ):
        if count > most:
            raise ApiError(413, f"the body of {len(body)} bytes has {count} {what}; allowed: {most}", "too_large")


def _deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH + 1):
        level = [outer for outer in level if type(outer) in (dict, list)]
        level = [inner for outer in level for inner in (outer.values() if type(outer) is dict else outer)]
    return bool(level)


def _bounded(body: Parsed, field: str) -> Any:
    """The value of a body, each of its parts within its bound.

    Raises:
        ApiError: one is not; it is named, with the number and what is allowed.
    """
    value = body.value
    if not isinstance(value, dict):
        return value
    items = [item for item in _list(value.get(field), MOST_MESSAGES, field) if isinstance(item, dict)]
    _list(value.get("tools"), MOST_TOOLS, "tools")
    parts = media = encoded = arguments = 0
    for item in items:
        for part in (*_inner(item, "content"), *_inner(item, "output")):
            parts += 1
            length = _media_length(part)
            media += length >= 0
            encoded += max(0, length)
        for call in (*_inner(item, "tool_calls"), item):
            parts += call is not item
            arguments += _arguments_length(call)
    for name, number, most in (
        (f"{field}: its parts and tool calls", parts, MOST_PARTS),
        (f"{field}: its media", media, MOST_MEDIA),
        (f"{field}: the characters of its tool calls' arguments", arguments, MOST_ARGUMENTS),
        ("bytes besides media", body.size - encoded, MOST_TEXT),
    ):
        if number > most:
            raise bad(f"{name} are {number}; allowed: {most}", field, "too_large")
    return value


def _list(raw: Any, most: int, name: str) -> list[Any]:
    if not isinstance(raw, list):
        return []
    if len(raw) > most:
        raise bad(f"{name} has {len(raw)} items; allowed: {most}", name, "too_many")
    return raw


def _inner(item: Mapping[str, Any], name: str) -> Iterator[dict[str, Any]]:
    inner = item.get(name)
    return (part for part in (inner if isinstance(inner, list) else ()) if isinstance(part, dict))


def _media_length(part: dict[str, Any]) -> int:
    """Characters of the media of a part, 0 of such that is in the store, -1 of one that has none."""
    sound = part.get("input_audio")
    if isinstance(sound, dict):
        data = sound.get("data")
        return len(data) if isinstance(data, str) else 0
    for name in _URLS:
        value = part.get(name)
        url = value.get("url") if isinstance(value, dict) else value
        if isinstance(url, str):
            return len(url) if url.startswith("data:") else 0
    return -1


def _arguments_length(call: dict[str, Any]) -> int:
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else call.get("arguments")
    return len(arguments) if isinstance(arguments, str) else 0


def weight(message: Mapping[str, Any]) -> int:
    """About how many bytes a message of a request has, for one whose body was parsed by somebody else."""
    content, calls = message.get("content"), message.get("tool_calls")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    length = sum(len(text) for text in texts if isinstance(text, str))
    for item in (*_inner(message, "content"), *_inner(message, "tool_calls")):
        length += max(0, _media_length(item)) + _arguments_length(item)
    return length + MESSAGE * (len(parts) + (len(calls) if isinstance(calls, list) else 0))

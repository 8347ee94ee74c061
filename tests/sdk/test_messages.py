"""Messages: the OpenAI schema there and back, and what observations are coerced to."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_sdk.errors import EnvError, MediaError, RelaxError
from relax_sdk.media import PARTS, Audio, Image, MediaKey, MediaRef, Video
from relax_sdk.media_places import MEDIA_SCHEME
from relax_sdk.messages import AssistantMessage, Message, Text, ToolCall, as_messages

PICTURE = Image.from_array(np.zeros((4, 4, 3), np.uint8))
SOUND = Audio.from_array(np.zeros(1600, np.float32))
CLIP = Video.from_array(np.zeros((2, 16, 16, 3), np.uint8))
MEDIA = (PICTURE, SOUND, CLIP)
REFS: dict[MediaKey, MediaRef] = {(cls.kind, part.ref.sha256): part.ref for part in MEDIA for cls in PARTS.values()}

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
parts = st.one_of(texts.map(Text), st.sampled_from(MEDIA))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(ToolCall, id=texts, name=texts, arguments=st.dictionaries(texts, json_values, max_size=3))
messages = st.one_of(
    st.builds(Message, role=st.sampled_from(["system", "user"]), content=st.lists(parts, max_size=4).map(tuple)),
    st.builds(Message, role=st.just("tool"), content=st.lists(parts, max_size=2).map(tuple), tool_call_id=texts),
    st.builds(
        AssistantMessage, content=st.lists(parts, max_size=2).map(tuple), tool_calls=st.lists(calls, max_size=2).map(tuple)
    ),
)


@given(messages)
def test_openai_there_and_back(message: Message) -> None:
    wire = json.loads(json.dumps(message.to_openai()))
    back = Message.from_openai(wire, REFS)
    assert back.text == message.text
    assert back.media == message.media
    assert (back.role, back.tool_calls, back.tool_call_id) == (message.role, message.tool_calls, message.tool_call_id)
    assert back.to_openai() == wire, "a second time around nothing changes"
    assert isinstance(back, AssistantMessage) == (message.role == "assistant")
    if message.media:
        assert back.content == message.content, "with media, the order of all parts is kept"


@given(messages.filter(lambda m: bool(m.media)))
def test_data_uris_carry_the_bytes(message: Message) -> None:
    back = Message.from_openai(message.to_openai(lambda part: part.data_uri()))
    assert [part.bytes() for part in back.media] == [part.bytes() for part in message.media]


def test_wire_forms() -> None:
    message = Message("user", (PICTURE, SOUND, CLIP, Text("?")))
    url = MEDIA_SCHEME + PICTURE.ref.sha256
    wire = message.to_openai()
    assert [part["type"] for part in wire["content"]] == ["image_url", "audio_url", "video_url", "text"]
    assert wire["content"][0] == {"type": "image_url", "image_url": {"url": url}}
    assert Message.from_openai({"role": "user", "content": [{"type": "image_url", "image_url": url}]}, REFS).media == (PICTURE,)


def test_openais_own_form_of_sound_is_read() -> None:
    data = SOUND.data_uri().split(",")[1]
    message = Message.from_openai(
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]}
    )
    assert message.media == (SOUND,)


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": "robot", "content": "x"},
        {"role": "user", "content": 3},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": [{"type": "smell"}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "text", "text": 3}]},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": 5}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "assistant", "content": None, "tool_calls": ["guess"]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": None}}]},
    ],
    ids=repr,
)
def test_what_is_no_chat_message(message: dict[str, Any]) -> None:
    with pytest.raises(EnvError):
        Message.from_openai(message)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://example.com/a.png", "remote media are not fetched"),
        ("file:///etc/passwd", "remote media are not fetched"),
        ("/etc/passwd", "remote media are not fetched"),
        ("data:image/png;base64,!!!!", "not valid base64"),
        ("data:image/png;base64,é", "not valid base64"),
        ("data:image/png;base64", "must read data:"),
        ("data:image/png,abc", "must read data:"),
        ("data:image/png;base64,AAAA", "not a readable image"),
        (MEDIA_SCHEME + "0" * 64, "no such media here"),
        (MEDIA_SCHEME + SOUND.ref.sha256, "is audio/wav, but stands in an image_url"),
    ],
)
def test_urls_that_are_refused(url: str, why: str) -> None:
    with pytest.raises(MediaError, match=why):
        Message.from_openai({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}, REFS)


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", '"x"', "[" * 10_000])
def test_arguments_that_are_not_an_object_are_the_models_mistake(arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "guess", "arguments": arguments}}
    (read,) = Message.from_openai({"role": "assistant", "content": None, "tool_calls": [call]}).tool_calls
    assert read.id == "a" and read.name == "guess" and read.arguments == {}
    assert read.error is not None and "guess" in read.error


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_no_arguments(arguments: Any) -> None:
    call = {"id": "a", "function": {"name": "look", "arguments": arguments}}
    (read,) = Message.from_openai({"role": "assistant", "content": "", "tool_calls": [call]}).tool_calls
    assert read == ToolCall("a", "look", {})


@given(
    st.recursive(st.none() | st.integers() | texts, lambda x: st.lists(x, max_size=3) | st.dictionaries(texts, x, max_size=3))
)
def test_any_json_is_read_or_refused_on_purpose(value: Any) -> None:
    for message in ({"role": "user", "content": value}, {"role": "assistant", "tool_calls": [{"function": value}]}):
        with contextlib.suppress(RelaxError):
            assert isinstance(Message.from_openai(message), Message)


# ------------------------------------------------------------------------------------------------------------- coercion


def test_media_are_exchanged_and_a_message_that_has_none_to_exchange_stays_itself() -> None:
    old, new = Image.from_array(np.zeros((4, 4, 3), np.uint8)), Image.from_array(np.ones((4, 4, 3), np.uint8))
    message = Message("user", (Text("look"), old))
    assert message.map_media(lambda part: new) == Message("user", (Text("look"), new))
    assert message.map_media(lambda part: part) is message
    assert Message("user", (Text("look"),)).map_media(lambda part: new).content == (Text("look"),)


def test_strings_and_parts_in_a_row_are_one_message() -> None:
    assert as_messages("hello") == [Message("user", (Text("hello"),))]
    assert as_messages(PICTURE) == [Message("user", (PICTURE,))]
    assert as_messages([PICTURE, "what?", Text("!")]) == [Message("user", (PICTURE, Text("what?"), Text("!")))]
    assert as_messages(("a",), role="tool") == [Message("tool", (Text("a"),))]
    assert as_messages(None) == as_messages([]) == []


def test_messages_stand_alone() -> None:
    system, said = Message("system", (Text("be brief"),)), AssistantMessage(content=(Text("ok"),))
    shown = as_messages([system, "a", PICTURE, said, {"role": "user", "content": "b"}, "c"])
    assert shown == [
        system,
        Message("user", (Text("a"), PICTURE)),
        said,
        Message("user", (Text("b"),)),
        Message("user", (Text("c"),)),
    ]


@given(st.lists(st.one_of(texts, parts, messages), max_size=6))
def test_coercion_keeps_all_content_in_order(observation: list[Any]) -> None:
    def flat(items: list[Any]) -> list[Any]:
        out: list[Any] = []
        for item in items:
            out += flat(list(item.content)) if isinstance(item, Message) else [Text(item) if isinstance(item, str) else item]
        return out

    once = as_messages(observation)
    assert flat(once) == flat(observation)
    assert as_messages(once) == once


@pytest.mark.parametrize(
    "observation",
    [3, 3.0, object(), [3], [["nested"]], b"bytes", np.zeros(3), {"no": "role"}, [None], MediaRef("0" * 64, "image/png", 1)],
    ids=lambda o: type(o).__name__,
)
def test_what_is_no_observation(observation: Any) -> None:
    with pytest.raises(EnvError):
        as_messages(observation)

"""Messages and their parts: the OpenAI chat schema, typed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self, TypeAlias

from relax_sdk.errors import EnvError, MediaError, UnstorableError
from relax_sdk.media import PARTS, Audio, Image, Media, MediaKey, MediaRef, Video, from_ref
from relax_sdk.media_places import MEDIA_SCHEME, read_data_uri
from relax_sdk.storable import check_storable, flaw_of_text, storable_text

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Text:
    """Words.

    Raises:
        EnvError: they hold half of a surrogate pair, which can neither be encoded nor stored.
    """

    text: str

    def __post_init__(self) -> None:
        if (what := flaw_of_text(self.text)) is not None:
            raise EnvError(f"a text {what}")


Part: TypeAlias = Text | Image | Audio | Video


@dataclass(frozen=True)
class ToolCall:
    """A model's wish to call a tool.

    Raises:
        EnvError: its name or its arguments have no form as JSON.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    error: str | None = None
    """Set when the model wrote something that could not be read as a call; it is then answered with this text."""

    def __post_init__(self) -> None:
        try:
            check_storable(self.name, "name")
            check_storable(self.arguments, "arguments", any_number=True)
        except UnstorableError as error:
            raise EnvError(f"the tool call {storable_text(self.name)[:80]!r} cannot be read: {error}") from error


@dataclass(frozen=True)
class Message:
    """One chat message: a role and parts in order."""

    role: Role
    content: tuple[Part, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    """Assistant messages only."""
    tool_call_id: str | None = None
    """Tool messages only: which call this answers."""

    @property
    def text(self) -> str:
        """All text parts, joined."""
        return "".join(part.text for part in self.content if isinstance(part, Text))

    @property
    def media(self) -> tuple[Media, ...]:
        """All parts that are not text, in order."""
        return tuple([part for part in self.content if isinstance(part, Media)])

    def map_media(self, change: Callable[[Media], Media]) -> Self:
        """The message with something else in place of each media part; the message itself where nothing is another."""
        content = tuple([change(part) if isinstance(part, Media) else part for part in self.content])
        same = all([new is old for new, old in zip(content, self.content, strict=True)])
        return self if same else replace(self, content=content)

    def to_openai(self, media: MediaForm | None = None) -> dict[str, Any]:
        """The message as an OpenAI chat dictionary.

        Args:
            media: turns a media part into the URL put on the wire; default `relax-media:<sha256>`.
        """
        url = media or (lambda part: MEDIA_SCHEME + part.ref.sha256)
        if all(isinstance(part, Text) for part in self.content):
            content: Any = self.text
        else:
            content = [_part_to_openai(part, url) for part in self.content]
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    @staticmethod
    def from_openai(
        message: Mapping[str, Any], media: Mapping[MediaKey, MediaRef] | None = None, inline: bool = True
    ) -> Message:
        """Read an OpenAI chat dictionary.

        Args:
            message: the dictionary; media as data URIs, base64 `input_audio`, or `relax-media:` URLs found in `media`.
            media: references by the kind of the part that names them, and sha256.
            inline: whether media may come inside the message; a service, which has them decoded elsewhere, says no.

        Raises:
            EnvError: not a chat message; arguments of a tool call that are not JSON are the model's mistake and become
                `ToolCall.error`.
            MediaError: a remote URL (never fetched), unknown reference, damaged data, or data where `inline` forbids them.
        """
        role = message.get("role")
        if role not in ("system", "user", "assistant", "tool"):
            raise EnvError(f"a message's role must be system, user, assistant or tool, got {role!r}")
        content = message.get("content") or ()
        if isinstance(content, str):
            content = ({"type": "text", "text": content},)
        if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
            raise EnvError(f"a message's content must be a string or a list of parts, got {content!r:.80}")
        parts = tuple(_part_from_openai(part, media or {}, inline) for part in content)
        calls = tuple(_call_from_openai(call) for call in message.get("tool_calls") or ())
        id = _call_id(message.get("tool_call_id"))
        if role != "assistant":
            return Message(role=role, content=parts, tool_calls=calls, tool_call_id=id)
        tokens = message.get("control_tokens") or ()
        if not isinstance(tokens, (list, tuple)):
            raise EnvError(f"control_tokens must be a list, got {tokens!r:.80}")
        control = tuple(_control_from_openai(token) for token in tokens)
        return AssistantMessage(content=parts, tool_calls=calls, tool_call_id=id, control_tokens=control)


@dataclass(frozen=True)
class ControlToken:
    """A token that is no text and that the policy wrote all the same, such as `</think>` or a `</tool_call>` with no call."""

    token: str
    """Its name in the tokenizer."""
    at: int
    """How many characters of the message's text stand before it."""


@dataclass(frozen=True)
class AssistantMessage(Message):
    """A message of the policy: the action of every Relax environment.

    `text` is what it wrote as text, `tool_calls` are the calls it wrote, and `control_tokens` is all else; the token that ends
    an answer belongs to none of them.
    """

    role: Role = "assistant"
    finish_reason: str = field(default="stop", kw_only=True)
    """`stop`, `length` (the token limit was hit) or `abort`."""
    control_tokens: tuple[ControlToken, ...] = field(default=(), kw_only=True)
    """Control tokens in the order they were written; on the wire `{"token": …, "at": …}`, which OpenAI does not have."""

    @property
    def unreadable_calls(self) -> int:
        """How many of the tool calls could not be read."""
        return sum(call.error is not None for call in self.tool_calls)

    def to_openai(self, media: MediaForm | None = None) -> dict[str, Any]:
        """The message as an OpenAI chat dictionary, with `control_tokens` where there are some.

        Args:
            media: as in `Message.to_openai`.
        """
        message = super().to_openai(media)
        if self.control_tokens:
            message["control_tokens"] = [{"token": token.token, "at": token.at} for token in self.control_tokens]
        return message

    def text_after(self, token: str) -> str:
        """The text behind the last control token of this name, such as the answer behind `</think>`; all text without one."""
        return self.text[max((found.at for found in self.control_tokens if found.token == token), default=0) :]


class MediaForm(Protocol):
    """How a media part is written into a message on the wire."""

    def __call__(self, part: Media, /) -> str: ...


Observation: TypeAlias = "str | Part | Message | Mapping[str, Any] | Sequence[str | Part | Message | Mapping[str, Any]] | None"
"""What `reset` and `step` may return; `as_messages` makes messages of it."""


def as_messages(observation: Any, role: Role = "user") -> list[Message]:
    """Coerce an observation to messages.

    A string, a part, or a list of strings and parts becomes one message of `role`; messages and OpenAI dictionaries stay
    as they are; `None` is no message.

    Raises:
        EnvError: anything else, naming the type found.
    """
    if observation is None:
        return []
    if isinstance(observation, (bytes, bytearray, memoryview)):
        raise EnvError(
            "an observation must be a string, part, message or list of these, got bytes; use Image.from_bytes or alike"
        )
    if isinstance(observation, (str, Text, Media, Message, Mapping)):
        observation = [observation]
    if not isinstance(observation, Iterable):
        raise EnvError(f"an observation must be a string, part, message or list of these, got {type(observation).__name__}")
    messages: list[Message] = []
    parts: list[Part] = []

    def flush() -> None:
        if parts:
            messages.append(Message(role, tuple(parts)))
            parts.clear()

    for item in observation:
        if isinstance(item, str):
            parts.append(Text(item))
        elif isinstance(item, (Text, Image, Audio, Video)):
            parts.append(item)
        elif isinstance(item, Message):
            flush()
            messages.append(item)
        elif isinstance(item, Mapping):
            flush()
            messages.append(Message.from_openai(item))
        else:
            raise EnvError(f"an observation may hold strings, parts and messages, got {type(item).__name__}")
    flush()
    return messages


def _part_to_openai(part: Part, url: MediaForm) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    key = f"{part.kind}_url"
    return {"type": key, key: {"url": url(part)}}


def _part_from_openai(part: Mapping[str, Any], media: Mapping[MediaKey, MediaRef], inline: bool) -> Part:
    kind = part.get("type")
    try:
        if kind == "text":
            return Text(_string(part["text"]))
        if kind == "input_audio":
            sound = _string(part["input_audio"]["data"])
            url = sound if sound.startswith(MEDIA_SCHEME) else f"data:audio/*;base64,{sound}"
        elif kind not in ("image_url", "audio_url", "video_url"):
            raise EnvError(f"a part's type must be text, image_url, audio_url, video_url or input_audio, got {kind!r}")
        else:
            url = _string(part[kind]["url"] if isinstance(part[kind], Mapping) else part[kind])
    except (LookupError, TypeError) as error:
        raise EnvError(f"a part of type {kind!r} is incomplete: {dict(part)!r:.120}") from error
    cls = PARTS[kind.removesuffix("_url").removeprefix("input_")]
    if url.startswith(MEDIA_SCHEME):
        ref = media.get((cls.kind, url[len(MEDIA_SCHEME) :]))
        if ref is None:
            raise MediaError(f"{url}: no such media here")
        if ref.kind != cls.kind:
            raise MediaError(f"{url}: is {ref.mime}, but stands in an {kind}")
        return from_ref(ref)  # type: ignore[return-value]
    if url.startswith("data:"):
        if not inline:
            raise MediaError(f"{url[:40]}: media cannot come inside this message; name stored ones: {MEDIA_SCHEME}<sha256>")
        return cls.from_bytes(read_data_uri(url))  # type: ignore[return-value]
    raise MediaError(f"{url[:80]}: remote media are not fetched; send the bytes as a data URI")


def _call_from_openai(call: Any) -> ToolCall:
    try:
        id, name = _string(call.get("id") or ""), _string(call["function"]["name"])
        text = call["function"].get("arguments") or "{}"
    except (LookupError, TypeError, AttributeError) as error:
        raise EnvError(f"a tool call needs function.name and function.arguments, got {call!r:.120}") from error
    try:
        arguments = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        return ToolCall(id, name, {}, error=f"the arguments of {name} are not JSON ({error})")
    if not isinstance(arguments, Mapping):
        return ToolCall(id, name, {}, error=f"the arguments of {name} must be a JSON object, got {text!r:.80}")
    try:
        return ToolCall(id, name, dict(arguments))
    except EnvError as error:
        return ToolCall(id, name, {}, error=str(error))


def _call_id(id: Any) -> str | None:
    try:
        return None if id is None else _string(id)
    except TypeError as error:
        raise EnvError(f"tool_call_id: {error}") from error


def _control_from_openai(token: Any) -> ControlToken:
    try:
        name, at = _string(token["token"]), token["at"]
    except (LookupError, TypeError) as error:
        raise EnvError(f"a control token needs token and at, got {token!r:.80}") from error
    if type(at) is not int or at < 0:
        raise EnvError(f"a control token's at must be an integer of 0 or more, got {at!r:.40}")
    return ControlToken(name, at)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {type(value).__name__}")
    if (what := flaw_of_text(value)) is not None:
        raise EnvError(f"a message's field {what}")
    return value

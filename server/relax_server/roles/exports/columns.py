"""Columns of Hugging Face datasets: conversations, and media that players of the hub know."""

from __future__ import annotations

from typing import Any

import datasets
from datasets import Features, List, Value

from relax_sdk.media import MediaRef

MEDIA = {"images": "image", "audios": "audio", "videos": "video"}
"""Kinds of media by the names of their columns."""
_PLAYED: dict[str, Any] = {"image": datasets.Image, "audio": datasets.Audio, "video": datasets.Video}
_CALL = {"id": Value("string"), "type": Value("string"), "function": {"name": Value("string"), "arguments": Value("string")}}


def message_feature(typed: bool) -> Any:
    """The feature of a conversation: a list of messages.

    Args:
        typed: contents are lists of parts, in which `{"type": "image"}` stands for the next item of the media column; else
            they are texts.
    """
    content: Any = List({"type": Value("string"), "text": Value("string")}) if typed else Value("string")
    return List(
        {"role": Value("string"), "content": content, "tool_calls": List(_CALL), "tool_call_id": Value("string")},
    )


def plain_messages(messages: list[dict[str, Any]], typed: bool) -> list[dict[str, Any]]:
    """OpenAI messages in the form of `message_feature`."""
    return [
        {
            "role": message["role"],
            "content": _content(message.get("content") or "", typed),
            "tool_calls": message.get("tool_calls") or None,
            "tool_call_id": message.get("tool_call_id"),
        }
        for message in messages
    ]


def _content(content: Any, typed: bool) -> Any:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not typed:
        return "".join(part["text"] for part in parts)
    return [{"type": p["type"].removesuffix("_url").removeprefix("input_"), "text": p.get("text")} for p in parts]


def media_columns(refs: list[MediaRef], prefix: str = "") -> dict[str, list[MediaRef]]:
    """Media by column, in order; all columns are there, also those without any."""
    return {f"{prefix}{name}": [ref for ref in refs if ref.kind == kind] for name, kind in MEDIA.items()}


def media_features(most: dict[str, int], single: bool) -> dict[str, tuple[str, Any]]:
    """Final name and feature of each media column that has anything.

    Args:
        most: items that a row has at most, by column.
        single: a column of at most one item a row holds the item itself, and its name has no `s`.
    """
    found = {}
    for name, n in most.items():
        if n:
            played = _PLAYED[next(kind for plural, kind in MEDIA.items() if name.endswith(plural))]()
            found[name] = (name.removesuffix("s"), played) if single and n == 1 else (name, List(played))
    return found


def schema_of(columns: dict[str, Any]) -> Any:
    """The Arrow schema of columns, with what `datasets` reads of it beside them."""
    return Features(columns).arrow_schema

"""Where OpenAI's messages hold media: as data URIs, as base64, or by name, `relax-media:<sha256>`."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from relax_sdk.errors import MediaError
from relax_sdk.media_formats import NOUNS, Kind
from relax_sdk.probing import MediaKey

MEDIA_SCHEME = "relax-media:"
"""Logged messages name media as `relax-media:<sha256>`; the bytes are in the run's media folder."""

SLICE = 1 << 20
"""Characters that are decoded together, so that other threads get their turn between them."""


@dataclass(frozen=True)
class MediaPlace:
    """One media item in a conversation as it came: messages, or items of the Responses API."""

    index: int
    """Index of the message."""
    kind: Kind
    holder: dict[str, Any]
    field: str
    """Name of the field of `holder` whose value names or holds the item."""

    @property
    def name(self) -> str | None:
        """The sha256 that it is named by; None: it is held here, or is somewhere else."""
        value = self.holder[self.field]
        return value[len(MEDIA_SCHEME) :] if value.startswith(MEDIA_SCHEME) else None

    def data(self) -> bytes | None:
        """The bytes that are held here; None: there are none.

        Raises:
            MediaError: not base64.
        """
        value = self.holder[self.field]
        if self.name is not None:
            return None
        if self.field == "data":
            return read_base64(value)
        return read_data_uri(value) if value.startswith("data:") else None

    def replace(self, sha256: str) -> None:
        """Put the name of the item in place of its bytes."""
        self.holder[self.field] = MEDIA_SCHEME + sha256


def media_places(items: Any) -> Iterator[MediaPlace]:
    """All media of a conversation, in order; what has not the form of a conversation is passed over."""
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if not isinstance(item, dict):
            continue
        for content in (item.get("content"), item.get("output")):
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict):
                    yield from _of_part(index, part)


def media_names(items: Any) -> set[MediaKey]:
    """The stored media that a conversation names, each as the kind that it stands for."""
    return {(place.kind, place.name) for place in media_places(items) if place.name is not None}


def _of_part(index: int, part: dict[str, Any]) -> Iterator[MediaPlace]:
    for kind in NOUNS:
        field = f"{kind}_url"
        value = part.get(field)
        if isinstance(value, dict) and isinstance(value.get("url"), str):
            yield MediaPlace(index, kind, value, "url")
        elif isinstance(value, str):
            yield MediaPlace(index, kind, part, field)
    sound = part.get("input_audio")
    if isinstance(sound, dict) and isinstance(sound.get("data"), str):
        yield MediaPlace(index, "audio", sound, "data")


def read_data_uri(url: str) -> bytes:
    """The bytes of a data URI; its MIME type is not believed.

    Raises:
        MediaError: not base64.
    """
    comma = url.find(",")
    if comma < 0 or not url.endswith(";base64", 0, comma):
        raise MediaError(f"{url[:40]}: a data URI must read data:<mime>;base64,<data>")
    return read_base64(url, comma + 1)


def read_base64(text: str, start: int = 0) -> bytes:
    """The bytes of a base64 text.

    Args:
        text: with nothing else behind the base64.
        start: where in it the base64 begins.

    Raises:
        MediaError: not base64.
    """
    try:
        parts = [base64.b64decode(text[at : at + SLICE], validate=True) for at in range(start, len(text), SLICE)]
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"media data are not valid base64 ({error})") from error
    if any(len(part) != SLICE // 4 * 3 for part in parts[:-1]):
        raise MediaError("media data are not valid base64 (padding before the end)")
    return b"".join(parts)

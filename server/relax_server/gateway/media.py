"""Media of a request: those that it names are looked up, those that it holds are taken into the store."""

from __future__ import annotations

from typing import Any

from relax_sdk.errors import MediaError
from relax_sdk.media import MediaKey, MediaRef
from relax_sdk.media_places import MediaPlace, media_places
from relax_server.gateway.errors import bad
from relax_server.gateway.played import PlayedSession, Surroundings

READ_SECONDS = 60.0
"""Seconds to read the base64 of one item."""


async def known_media(around: Surroundings, session: PlayedSession, items: Any) -> dict[MediaKey, MediaRef]:
    """References of the media of a conversation; unknown ones are left out, and refused where they stand.

    Args:
        around: where media are stored.
        session: that the request is for.
        items: messages, or items of the Responses API, as they came; media that they hold become names.

    Raises:
        ApiError: an item is refused; its message is named by its number.
    """
    found: dict[MediaKey, MediaRef] = {}
    for place in media_places(items):
        if (place.kind, place.name) in found:
            continue
        try:
            ref = await _ref(around, session, place)
        except MediaError as error:
            raise bad(f"messages[{place.index}]: {error}", f"messages[{place.index}]", "invalid_message") from error
        if ref is not None:
            found[place.kind, ref.sha256] = ref
    return found


async def _ref(around: Surroundings, session: PlayedSession, place: MediaPlace) -> MediaRef | None:
    if place.name is not None:
        return await around.media_ref(place.name, place.kind)
    data = await around.media_threads.call(place.data, limit=READ_SECONDS)
    if data is None:
        return None
    ref = await around.take_media(place.kind, data, session.owner)
    place.replace(ref.sha256)
    return ref

"""Media of the store that a request names."""

from __future__ import annotations

from typing import Any

from relax_sdk.media import MediaKey, MediaRef
from relax_sdk.messages import media_names
from relax_server.gateway.played import Surroundings


async def known_media(around: Surroundings, items: Any) -> dict[MediaKey, MediaRef]:
    """References of the stored media that a conversation names; unknown ones are left out, and refused where they stand."""
    return {
        (kind, sha256): ref for kind, sha256 in media_names(items) if (ref := await around.media_ref(sha256, kind)) is not None
    }

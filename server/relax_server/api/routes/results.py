"""What was recorded: trajectories and media."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import FileResponse, Response

from relax_sdk.errors import RelaxError
from relax_server.api.dependencies import Caller, Core
from relax_server.api.errors import unknown
from relax_server.api.wire import json_response, whole_trajectory

router = APIRouter()


@router.get("/v1/trajectories/{id:path}")
async def trajectory(core: Core, key: Caller, id: Annotated[str, Path(max_length=500)]) -> Response:
    """One trajectory, with every token."""
    try:
        found = await core.ask(core.journal.trajectory, id)
    except RelaxError as error:
        raise unknown("trajectory", id, f": {error}") from error
    return json_response(whole_trajectory(found))


@router.get("/v1/media/{sha256}")
async def media(core: Core, key: Caller, sha256: Annotated[str, Path(pattern="^[0-9a-f]{64}$")]) -> Response:
    """One media item; ranges can be asked for."""
    ref = await core.media_ref(sha256)
    if ref is None:
        raise unknown("media", sha256)
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}
    return FileResponse(core.store.path(ref), media_type=ref.mime, headers=headers)

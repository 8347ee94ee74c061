"""What was recorded: trajectories and media."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Path
from fastapi.responses import FileResponse, Response
from starlette.requests import Request

from relax_server.api.dependencies import Caller, Core
from relax_server.api.keys import LOCAL
from relax_server.api.trajectories import whole_trajectory
from relax_server.gateway.errors import unknown
from relax_server.gateway.wire import json_response, read_body
from relax_server.json_form import as_json

router = APIRouter()


@router.get("/v1/trajectories/{id:path}")
async def trajectory(core: Core, key: Caller, id: Annotated[str, Path(max_length=500)]) -> Response:
    """One trajectory, with every token: for the key that it was made for, and for those that administer.

    Who needs no key sees what belongs to none.
    """

    def read() -> bytes | None:
        found = core.journal.owned_trajectory(id)
        if found is None or not (found[1] == key.id or (found[1] is None and key is LOCAL) or key.may("admin")):
            return None
        return as_json(whole_trajectory(found[0]))

    told = await core.read(key, read)
    if told is None:
        raise unknown("trajectory", id)
    return Response(told, media_type="application/json")


@router.get("/v1/media/{sha256}")
async def media(core: Core, key: Caller, sha256: Annotated[str, Path(pattern="^[0-9a-f]{64}$")]) -> Response:
    """One media item, for every key that knows the hash of its bytes; ranges can be asked for."""
    ref = await core.media_ref(sha256)
    if ref is None:
        raise unknown("media", sha256)
    headers = {
        "Cache-Control": "private, max-age=31536000, immutable",
        "Content-Security-Policy": "default-src 'none'; sandbox",
    }
    return FileResponse(core.store.path(ref), media_type=ref.mime, headers=headers)


@router.post("/v1/media/{kind}", status_code=201)
async def put_media(core: Core, key: Caller, kind: Literal["image", "audio", "video"], request: Request) -> Response:
    """Store a media item, the body as it is; messages can then name it as `relax-media:<sha256>`."""
    data = await read_body(request, core.config.max_body)
    return json_response(asdict(await core.take_media(kind, data, key.id)), 201)

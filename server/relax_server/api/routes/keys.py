"""Keys, for those with the right to administer."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import Response

from relax_server.api.dependencies import Admin, Core
from relax_server.api.schemas import KeyBody
from relax_server.gateway.errors import unknown
from relax_server.gateway.wire import json_response

router = APIRouter()


@router.post("/v1/keys", status_code=201)
async def make_key(body: KeyBody, core: Core, key: Admin) -> Response:
    """Make a key; its secret is told once."""
    secret, made = await core.ask(lambda: core.keys.create(**body.model_dump()))
    core.locked = not core.config.no_keys
    return json_response({"secret": secret, "id": made.id, "name": made.name, "rights": sorted(made.rights)}, 201)


@router.get("/v1/keys")
async def list_keys(core: Core, key: Admin) -> Response:
    """All keys, without their secrets."""
    return json_response({"keys": await core.ask(core.keys.list)})


@router.delete("/v1/keys/{id}")
async def revoke_key(core: Core, key: Admin, id: Annotated[str, Path(max_length=64)]) -> Response:
    """End a key."""
    if not await core.ask(core.keys.revoke, id):
        raise unknown("key", id)
    return json_response({"id": id, "revoked": True})

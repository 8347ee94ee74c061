"""Rollouts: groups of episodes that the service plays by itself."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query
from fastapi.responses import Response
from starlette.requests import Request

from relax_server.api.dependencies import Caller, Core, Rollouts
from relax_server.api.event_stream import Ending, follow
from relax_server.api.schemas import RolloutBody
from relax_server.gateway.wire import json_response

router = APIRouter()
Id = Annotated[str, Path(max_length=64)]


@router.post("/v1/rollouts", status_code=202)
async def submit(
    rollouts: Rollouts,
    key: Caller,
    body: RolloutBody,
    idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> Response:
    """Start groups of episodes; with an `Idempotency-Key`, repeating the request changes nothing."""
    rollout, new = await rollouts.submit(body, key, idempotency_key)
    return json_response(asdict(rollout), 202 if new else 200)


@router.get("/v1/rollouts")
async def list_rollouts(rollouts: Rollouts, key: Caller, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> Response:
    """The caller's rollouts, newest first."""
    return json_response({"rollouts": [asdict(r) for r in await rollouts.list(key, limit)]})


@router.get("/v1/rollouts/{id}")
async def get_rollout(rollouts: Rollouts, key: Caller, id: Id) -> Response:
    """State and counts."""
    return json_response(asdict(await rollouts.get(id, key)))


@router.delete("/v1/rollouts/{id}")
async def cancel_rollout(rollouts: Rollouts, key: Caller, id: Id) -> Response:
    """Cancel; generation in flight is aborted, groups that are done stay."""
    return json_response(asdict(await rollouts.cancel(await rollouts.get(id, key))))


@router.get("/v1/rollouts/{id}/events")
async def rollout_events(core: Core, rollouts: Rollouts, key: Caller, id: Id, request: Request) -> Response:
    """Follow by server-sent events: `queued`, `running`, `group` for each that is durable, `finished`."""
    rollout = await rollouts.get(id, key)

    async def look() -> Ending:
        return (await rollouts.get(id, key)).ending

    return follow(core, rollout.topic, request, rollout.ending, look)

"""Pause and resume: the whole service, or one rollout."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import Response

from relax_server.api.dependencies import Caller, Core, Operator, Pauses, Rollouts
from relax_server.gateway.wire import json_response

router = APIRouter()
Id = Annotated[str, Path(max_length=64)]


@router.post("/v1/pause")
async def pause(core: Core, pausing: Pauses, key: Operator) -> Response:
    """Begin no episode and send no model call until `POST /v1/resume`; what is under way ends, what is held is not timed."""
    await pausing.set(True)
    return json_response({"status": core.status})


@router.post("/v1/resume")
async def resume(core: Core, pausing: Pauses, key: Operator) -> Response:
    """Go on; rollouts that were paused by themselves stay so."""
    await pausing.set(False)
    return json_response({"status": core.status})


@router.post("/v1/rollouts/{id}/pause")
async def pause_rollout(rollouts: Rollouts, key: Caller, id: Id) -> Response:
    """Begin no episode of a rollout and send none of its model calls until it is resumed; it stays paused over a restart."""
    return json_response(asdict(await rollouts.pause(await rollouts.get(id, key))))


@router.post("/v1/rollouts/{id}/resume")
async def resume_rollout(rollouts: Rollouts, key: Caller, id: Id) -> Response:
    """Go on with a rollout."""
    return json_response(asdict(await rollouts.unpause(await rollouts.get(id, key))))

"""Pause and resume: the whole service, or one rollout."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import Response

from relax_server.api.core import ServiceCore
from relax_server.api.dependencies import Caller, Core, Hub, Operator, Rollouts
from relax_server.api.rollouts import RolloutHub
from relax_server.api.sessions import SessionHub
from relax_server.gateway.wire import json_response

router = APIRouter()
Id = Annotated[str, Path(max_length=64)]


@router.post("/v1/pause")
async def pause(core: Core, hub: Hub, rollouts: Rollouts, key: Operator) -> Response:
    """Begin no episode and send no model call until `POST /v1/resume`; what is under way ends, what is held is not timed."""
    if core.gate.is_set():
        core.gate.clear()
        _tell(core, hub, rollouts, "paused")
    return json_response({"status": core.status})


@router.post("/v1/resume")
async def resume(core: Core, hub: Hub, rollouts: Rollouts, key: Operator) -> Response:
    """Go on; rollouts that were paused by themselves stay so."""
    if not core.gate.is_set():
        core.gate.set()
        _tell(core, hub, rollouts, "resumed")
    return json_response({"status": core.status})


@router.post("/v1/rollouts/{id}/pause")
async def pause_rollout(rollouts: Rollouts, key: Caller, id: Id) -> Response:
    """Begin no episode of a rollout and send none of its model calls until it is resumed; it stays paused over a restart."""
    return json_response(asdict(await rollouts.pause(await rollouts.get(id, key))))


@router.post("/v1/rollouts/{id}/resume")
async def resume_rollout(rollouts: Rollouts, key: Caller, id: Id) -> Response:
    """Go on with a rollout."""
    return json_response(asdict(await rollouts.unpause(await rollouts.get(id, key))))


def _tell(core: ServiceCore, hub: SessionHub, rollouts: RolloutHub, kind: str) -> None:
    """Everybody who follows something that it concerns."""
    for topic in [session.topic for session in hub.unfinished] + rollouts.topics:
        core.events.add(topic, kind, by="service")

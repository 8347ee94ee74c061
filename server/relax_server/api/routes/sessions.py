"""Sessions: agents outside play episodes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response
from starlette.requests import Request

from relax_server.api import opening
from relax_server.api.dependencies import Caller, Core, Hub, OpenSession, Session
from relax_server.api.event_stream import follow
from relax_server.api.outcomes import EndedSession
from relax_server.api.schemas import SessionBody
from relax_server.gateway.bodies import RewardBody, StepBody
from relax_server.gateway.step import take_step
from relax_server.gateway.wire import json_response, on_wire

router = APIRouter()


@router.post("/v1/sessions", status_code=201)
async def open_session(body: SessionBody, core: Core, hub: Hub, key: Caller, request: Request) -> Response:
    """Open an episode that an agent outside plays."""
    _, told = await opening.open_session(core, hub, key, body, str(request.base_url))
    return json_response(told, 201)


@router.get("/v1/sessions")
async def sessions(hub: Hub, key: Caller, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> Response:
    """The caller's sessions, newest first, behind the open ones those that are over."""
    return json_response({"sessions": await hub.of(key, limit)})


@router.get("/v1/sessions/{id}")
async def get_session(session: Session) -> Response:
    """Where a session is, and, until it is over, what an agent begins with."""
    if isinstance(session, EndedSession):
        return json_response(session.state | {"observation": [], "tools": []})
    first = on_wire(session.observation, session.media_form)
    return json_response(session.state | {"observation": first, "tools": list(session.tools)})


@router.delete("/v1/sessions/{id}")
async def cancel_session(session: Session) -> Response:
    """Cancel a session; generation in flight is aborted."""
    await session.cancel_and_wait()
    return json_response(session.state)


@router.post("/v1/sessions/{id}/step")
async def step(core: Core, session: OpenSession, body: StepBody) -> Response:
    """Act in the environment; tool calls go to its tools."""
    return json_response(await take_step(core, session, body))


@router.post("/v1/sessions/{id}/reward")
async def reward(session: OpenSession, body: RewardBody) -> Response:
    """Set a component of the reward from outside."""
    return json_response(session.reward(body))


@router.post("/v1/sessions/{id}/finish")
async def finish(session: Session) -> Response:
    """End the episode; answered when its trajectory is scored and durable. After a 503 it can be repeated until it is."""
    return json_response(await session.finish())


@router.get("/v1/sessions/{id}/events")
async def session_events(core: Core, session: Session, request: Request) -> Response:
    """Follow a session by server-sent events."""
    ending = session.outcome if isinstance(session, EndedSession) else None
    return follow(core, session.topic, request, ending)

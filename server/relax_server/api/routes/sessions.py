"""Sessions: agents outside play episodes."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import Response
from starlette.requests import Request

from relax_sdk.errors import RelaxError
from relax_server.api import opening
from relax_server.api.dependencies import Caller, Core, Hub, Session
from relax_server.api.event_stream import follow
from relax_server.api.schemas import SessionBody
from relax_server.api.sessions import ExternalSession
from relax_server.api.trajectories import finished
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
    """The caller's sessions, newest first."""
    return json_response({"sessions": [_session(s) for s in hub.of(key)[:limit]]})


@router.get("/v1/sessions/{id}")
async def get_session(session: Session) -> Response:
    """Where a session is, and what an agent begins with."""
    first = on_wire(session.observation, session.media_form)
    more = {"observation": first, "tools": list(session.tools), "seed": session.episode.task.seed}
    return json_response(_session(session) | more)


@router.delete("/v1/sessions/{id}")
async def cancel_session(session: Session) -> Response:
    """Cancel a session; generation in flight is aborted."""
    session.cancel()
    with contextlib.suppress(RelaxError):
        await session.saved
    return json_response(_session(session))


@router.post("/v1/sessions/{id}/step")
async def step(core: Core, session: Session, body: StepBody) -> Response:
    """Act in the environment; tool calls go to its tools."""
    return json_response(await take_step(core, session, body))


@router.post("/v1/sessions/{id}/reward")
async def reward(session: Session, body: RewardBody) -> Response:
    """Set a component of the reward from outside."""
    return json_response(session.reward(body))


@router.post("/v1/sessions/{id}/finish")
async def finish(session: Session) -> Response:
    """End the episode; answered when its trajectory is scored and durable."""
    return json_response(await session.finish())


@router.get("/v1/sessions/{id}/events")
async def session_events(core: Core, session: Session, request: Request) -> Response:
    """Follow a session by server-sent events."""
    done = session.saved.done() and session.saved.exception() is None
    return follow(core, session.topic, request, finished(session.saved.result()) if done else None)


def _session(session: ExternalSession) -> dict[str, Any]:
    episode = session.episode
    return {
        "id": session.id,
        "env": episode.context.spec.id,
        "state": str(episode.state),
        "turns": len(episode.session.turns),
        "calls": session.calls,
        "done": episode.session.done,
        "trajectory_id": session.trajectory_id,
        "error": str(episode.error) if episode.error is not None else None,
    }

"""What route functions are given: the service's parts, the caller, and the session in the path.

All are coroutines, as FastAPI calls a plain function in a thread.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path
from starlette.requests import Request

from relax_server.api.auth import caller, session_of
from relax_server.api.core import ServiceCore
from relax_server.api.keys import Key
from relax_server.api.rollouts import RolloutHub
from relax_server.api.sessions import ExternalSession, SessionHub


async def _core(request: Request) -> ServiceCore:
    return request.app.state.core


async def _hub(request: Request) -> SessionHub:
    return request.app.state.hub


async def _rollouts(request: Request) -> RolloutHub:
    return request.app.state.rollouts


Core = Annotated[ServiceCore, Depends(_core)]
Hub = Annotated[SessionHub, Depends(_hub)]
Rollouts = Annotated[RolloutHub, Depends(_rollouts)]


async def _caller(request: Request, core: Core) -> Key:
    return await caller(request, core)


async def _admin(request: Request, core: Core) -> Key:
    return await caller(request, core, "admin")


async def _session(request: Request, core: Core, hub: Hub, id: Annotated[str, Path(max_length=64)]) -> ExternalSession:
    return await session_of(request, core, hub, id)


Caller = Annotated[Key, Depends(_caller)]
"""Anybody with the right to run."""
Admin = Annotated[Key, Depends(_admin)]
Session = Annotated[ExternalSession, Depends(_session)]
"""For its own key or its owner's."""

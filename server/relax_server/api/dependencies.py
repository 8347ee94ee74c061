"""What route functions are given: the service's parts, the caller, and the session in the path.

All are coroutines, as FastAPI calls a plain function in a thread.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path
from starlette.requests import Request

from relax_server.api.auth import caller, session_of
from relax_server.api.core import ServiceCore
from relax_server.api.external_session import AnySession, ExternalSession, still_open
from relax_server.api.keys import LOCAL, Key
from relax_server.api.readiness import Readiness
from relax_server.api.rollouts import RolloutHub
from relax_server.api.service_pause import ServicePause
from relax_server.api.sessions import SessionHub
from relax_server.api.trainings.hub import TrainingHub
from relax_server.gateway.errors import ApiError


async def _core(request: Request) -> ServiceCore:
    return request.app.state.core


async def _hub(request: Request) -> SessionHub:
    return request.app.state.hub


async def _trainings(request: Request) -> TrainingHub:
    return request.app.state.trainings


async def _rollouts(request: Request) -> RolloutHub:
    return request.app.state.rollouts


async def _readiness(request: Request) -> Readiness:
    return request.app.state.readiness


async def _pausing(request: Request) -> ServicePause:
    return request.app.state.pausing


Core = Annotated[ServiceCore, Depends(_core)]
Hub = Annotated[SessionHub, Depends(_hub)]
Trainings = Annotated[TrainingHub, Depends(_trainings)]
Ready = Annotated[Readiness, Depends(_readiness)]
Pauses = Annotated[ServicePause, Depends(_pausing)]
Rollouts = Annotated[RolloutHub, Depends(_rollouts)]


async def _caller(request: Request, core: Core) -> Key:
    return await caller(request, core)


async def _admin(request: Request, core: Core) -> Key:
    return await caller(request, core, "admin")


async def _uploader(request: Request, core: Core) -> Key:
    return await caller(request, core, "upload")


async def _operator(request: Request, core: Core) -> Key:
    key = await caller(request, core)
    if key is not LOCAL:
        return await caller(request, core, "admin")
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise ApiError(403, "a web page of another site may not do this", "forbidden")
    return key


async def _session(request: Request, core: Core, hub: Hub, id: Annotated[str, Path(max_length=64)]) -> AnySession:
    return await session_of(request, core, hub, id)


Caller = Annotated[Key, Depends(_caller)]
"""Anybody with the right to run."""
Admin = Annotated[Key, Depends(_admin)]
Uploader = Annotated[Key, Depends(_uploader)]
"""Anybody with the right to bring code."""
Operator = Annotated[Key, Depends(_operator)]
"""Somebody with the right to administer, or anybody on this machine while there are no keys."""
Session = Annotated[AnySession, Depends(_session)]
"""The session in the path, for its own key or its owner's."""


async def _open_session(session: Session) -> ExternalSession:
    return still_open(session)


OpenSession = Annotated[ExternalSession, Depends(_open_session)]
"""The same, if it is not over."""

"""`POST /v1/chat/completions`: a model call with a key of the service, recorded as a session of this one call."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from relax_server.api.auth import caller
from relax_server.api.core import ServiceCore
from relax_server.api.external_session import ExternalSession
from relax_server.api.opening import open_session
from relax_server.api.schemas import SessionBody
from relax_server.api.sessions import SessionHub
from relax_server.engines.base import Generation
from relax_server.gateway.chat_route import ChatRoute
from relax_server.gateway.openai_chat import ModelCall
from relax_server.gateway.played import PlayedSession
from relax_server.rollout.calls import Answer

TRAJECTORY = "X-Relax-Trajectory"
"""The header of an answer that names its trajectory."""


class OneCallRoute(ChatRoute):
    """Chat completions outside of any session: each opens one, without an environment, and finishes it.

    Args:
        core: of the service.
        hub: of its sessions.
    """

    def __init__(self, core: ServiceCore, hub: SessionHub) -> None:
        super().__init__(core, self._open)
        self._core, self._hub = core, hub

    @property
    def route(self) -> Route:
        """Where it is served."""
        return Route("/v1/chat/completions", self.handle, methods=["POST"])

    async def handle(self, request: Request) -> Response:
        """Answer one request; when the answer has ended, its trajectory is durable."""
        try:
            response = await super().handle(request)
        except BaseException:
            self._cancel(request)
            raise
        session = getattr(request.state, "session", None)
        if session is not None and response.status_code < 300:
            response.headers[TRAJECTORY] = session.trajectory_id
        else:
            self._cancel(request)
        return response

    async def ask(
        self, session: PlayedSession, call: ModelCall, size: int, on_partial: Callable[[Generation], None] | None = None
    ) -> Answer:
        try:
            answer = await super().ask(session, call, size, on_partial)
            await session.finish()
            return answer
        except BaseException:
            assert isinstance(session, ExternalSession)
            session.cancel()
            raise

    async def _open(self, request: Request) -> PlayedSession:
        key = await caller(request, self._core)
        session, _ = await open_session(self._core, self._hub, key, SessionBody(), "")
        request.state.session = session
        return session

    def _cancel(self, request: Request) -> None:
        session: ExternalSession | None = getattr(request.state, "session", None)
        if session is not None:
            session.cancel()

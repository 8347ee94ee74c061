"""The service's HTTP routes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from relax_sdk.errors import RelaxError
from relax_server.api.auth import session_called
from relax_server.api.chat_route import ChatRoute
from relax_server.api.core import ServiceCore
from relax_server.api.errors import ApiError, as_api_error, bad
from relax_server.api.logs import RequestLog
from relax_server.api.metrics import ServiceState
from relax_server.api.openai_responses import ResponsesRoute
from relax_server.api.openapi import describe
from relax_server.api.retention import Retention
from relax_server.api.rollouts import RolloutHub
from relax_server.api.routes import envs, health, keys, pausing, results, rollouts, runs, session_socket, sessions
from relax_server.api.sessions import ExternalSession, SessionHub
from relax_server.api.trainings.hub import TrainingHub
from relax_server.api.wire import error_response, json_response

logger = logging.getLogger(__name__)


def make_app(core: ServiceCore, closing: Callable[[], Any] | None = None) -> FastAPI:
    """The application.

    Args:
        core: the parts it is made of.
        closing: awaited when it ends, before the parts are let go.
    """
    hub, rolling, training = SessionHub(core), RolloutHub(core), TrainingHub(core)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await core.envs.load()
        await rolling.resume()
        await training.resume()
        pruning = asyncio.create_task(Retention(core, hub).run())
        yield
        core.draining = True
        pruning.cancel()
        await training.close()
        await rolling.close()
        await hub.drain(0.0)
        if closing is not None:
            await closing()
        await core.close()

    app = FastAPI(title="Relax Gym", version="1", lifespan=lifespan, docs_url="/docs", redoc_url=None)
    core.metrics.watch(ServiceState(lambda: _readings(core, hub, rolling)))
    app.state.core, app.state.hub, app.state.rollouts, app.state.trainings = core, hub, rolling, training
    _errors(app)
    calls = _model_calls(core, hub)
    app.add_middleware(First, routes=calls)
    if core.config.loopback:  # a web page must not reach it under a name of its own
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[core.config.host, "127.0.0.1", "localhost", "::1", "[::1]"])
    app.add_middleware(RequestLog)

    for module in (health, envs, sessions, session_socket, rollouts, runs, pausing, results, keys):
        app.include_router(module.router)

    app.router.routes.extend(calls)
    describe(app)
    return app


class First:
    """Routes that are tried before all others, and before what those need: every model call comes this way.

    Args:
        app: where everything else goes.
        routes: plain ones, whose endpoints answer their own errors.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        self.app, self.routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for route in self.routes:
                match, found = route.matches(scope)
                if match is Match.FULL:
                    scope.update(found)
                    await route.handle(scope, receive, send)
                    return
        await self.app(scope, receive, send)


def _model_calls(core: ServiceCore, hub: SessionHub) -> list[Route]:
    """What an OpenAI client calls."""

    async def models(request: Request) -> Response:
        model = {"id": core.config.model, "object": "model", "created": 0, "owned_by": "relax"}
        return json_response({"object": "list", "data": [model]})

    async def find(request: Request) -> ExternalSession:
        return await session_called(request, core, hub)

    chat, responses, routes = ChatRoute(core, find), ResponsesRoute(core, find), list[Route]()
    for base in ("/v1/sessions/{id}/openai/v1", "/v1/openai/v1"):
        routes.append(Route(f"{base}/chat/completions", chat.handle, methods=["POST"]))
        routes.append(Route(f"{base}/responses", responses.handle, methods=["POST"]))
        routes.append(Route(f"{base}/models", models, methods=["GET"]))
    return routes


def _readings(core: ServiceCore, hub: SessionHub, rolling: RolloutHub) -> list[tuple[str, str, str, dict[str, float]]]:
    """What the service is doing now, for its metrics."""
    states = {str(state): float(n) for state, n in core.tally.states.items()}
    engines = core.pool.stats()
    return [
        ("relax_episode_states", "Episodes that are in a state now, or ended in it.", "state", states),
        ("relax_episodes_running", "Places taken.", "", {"": float(core.slots.running.total())}),
        ("relax_episodes_waiting", "Episodes that wait for a place.", "", {"": float(core.slots.waiting)}),
        ("relax_sessions_open", "Sessions that are not over.", "", {"": float(hub.open_count)}),
        ("relax_paused", "Whether the service is paused.", "", {"": float(not core.gate.is_set())}),
        ("relax_rollouts_playing", "Rollouts under way.", "", {"": float(rolling.playing)}),
        ("relax_engine_up", "Whether an engine answers.", "engine", {e["url"]: float(e["up"]) for e in engines}),
        ("relax_engine_calls", "Calls in flight.", "engine", {e["url"]: float(e["running"]) for e in engines}),
    ]


def _errors(app: FastAPI) -> None:
    """Every error in OpenAI's shape."""

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, RelaxError)
        return error_response(as_api_error(error))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        return error_response(bad(f"{place or 'body'}: {first['msg']}", place or None, "invalid_request"))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(ApiError(error.status_code, message, "http_error", headers=dict(error.headers or {})))

    async def bug(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(ApiError(500, f"the service failed: {type(error).__name__}; see its log", "internal_error"))

    app.add_exception_handler(RelaxError, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, bug)

"""The service's HTTP routes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.types import ASGIApp

from relax_sdk.errors import RelaxError
from relax_server.api.auth import known_caller, session_called
from relax_server.api.core import ServiceCore
from relax_server.api.door.front import in_front
from relax_server.api.external_session import ExternalSession
from relax_server.api.log_rotation import LogRotation
from relax_server.api.loop_watch import LoopWatch
from relax_server.api.metrics import ServiceState
from relax_server.api.openapi import describe
from relax_server.api.readiness import Readiness
from relax_server.api.retention import Retention
from relax_server.api.rollouts import RolloutHub
from relax_server.api.routes import docs, engines, envs, health, keys, pausing, results, rollouts, runs, sessions
from relax_server.api.routes.one_call import OneCallRoute
from relax_server.api.routes.session_socket import SessionSocket
from relax_server.api.service_pause import ServicePause
from relax_server.api.sessions import SessionHub
from relax_server.api.trainings.hub import TrainingHub
from relax_server.api.viewing import ServiceDoor
from relax_server.gateway.chat_route import ChatRoute
from relax_server.gateway.errors import ApiError, as_api_error, invalid
from relax_server.gateway.openai_responses import ResponsesRoute
from relax_server.gateway.wire import error_response, json_response
from relax_server.viewer.app import ViewerApp
from relax_server.viewer.pages import Pages

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Application:
    """What a server serves."""

    sessions: SessionHub
    trainings: TrainingHub
    asgi: ASGIApp


def make_app(core: ServiceCore, closing: Callable[[], Any] | None = None) -> Application:
    """The application.

    Args:
        core: the parts it is made of.
        closing: awaited when it ends, before the parts are let go.
    """
    hub, rolling, training, readiness = SessionHub(core), RolloutHub(core), TrainingHub(core), Readiness(core)
    door = ServiceDoor(core, training)
    viewer = ViewerApp(door, Pages())

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watch = LoopWatch(core.metrics.registry)
        watch.start()
        await core.envs.load()
        for_ever = [asyncio.create_task(work) for work in (Retention(core, hub).run(), core.watch.run())]
        if core.place.home:
            await rolling.resume()
            await training.resume()
            for_ever.append(asyncio.create_task(LogRotation(core.config.folder, core.config.max_log).run()))
        yield
        core.draining = True
        readiness.close()
        for task in for_ever:
            task.cancel()
        viewer.close()
        door.close()
        await training.close()
        await rolling.close()
        await hub.drain()
        if closing is not None:
            await closing()
        await core.close()
        watch.stop()

    app = FastAPI(title="Relax Gym", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    core.metrics.watch(ServiceState(lambda: _readings(core, hub, rolling)))
    app.state.core, app.state.hub, app.state.rollouts, app.state.trainings = core, hub, rolling, training
    app.state.readiness, app.state.pausing = readiness, ServicePause(core, hub, rolling)
    _errors(app)
    for module in (docs, health, envs, sessions, rollouts, runs, engines, pausing, results, keys):
        app.include_router(module.router)

    app.router.routes.append(Mount("/view/", viewer))  # answers its own errors, and looks at keys itself

    calls, sockets = _model_calls(core, hub), SessionSocket(core, hub).routes
    app.router.routes.extend(calls)  # where their other methods are refused
    describe(app)
    return Application(hub, training, in_front(app, [*calls, *sockets], bug, core, hub))


def _model_calls(core: ServiceCore, hub: SessionHub) -> list[Route | WebSocketRoute]:
    """What an OpenAI client calls."""

    async def models(request: Request) -> Response:
        try:
            await known_caller(request, core, hub)
        except RelaxError as error:
            return error_response(as_api_error(error))
        model = {"id": core.config.model, "object": "model", "created": 0, "owned_by": "relax"}
        return json_response({"object": "list", "data": [model]})

    async def find(request: Request) -> ExternalSession:
        return await session_called(request, core, hub)

    chat, responses, routes = ChatRoute(core, find), ResponsesRoute(core, find), list[Route | WebSocketRoute]()
    for base in ("/v1/sessions/{id}/openai/v1", "/v1/openai/v1"):
        routes.append(Route(f"{base}/chat/completions", chat.handle, methods=["POST"]))
        routes.append(Route(f"{base}/responses", responses.handle, methods=["POST"]))
        routes.append(Route(f"{base}/models", models, methods=["GET"]))
    return [*routes, OneCallRoute(core, hub).route]


def _readings(core: ServiceCore, hub: SessionHub, rolling: RolloutHub) -> list[tuple[str, str, str, dict[str, float]]]:
    """What the service is doing now, for its metrics."""
    states = {str(state): float(n) for state, n in core.tally.states.items()}
    engines = core.pool.stats()
    return [
        ("relax_episode_states", "Episodes that are in a state now, or ended in it.", "state", states),
        ("relax_episodes_running", "Places taken.", "", {"": float(core.slots.running.total())}),
        ("relax_episodes_waiting", "Episodes that wait for a place.", "", {"": float(core.slots.waiting)}),
        ("relax_sessions_open", "Sessions that are not over.", "", {"": float(hub.open_count)}),
        ("relax_events_dropped", "Events let go as the journal did not take them.", "", {"": float(core.events.dropped)}),
        ("relax_media_processes_ended", "Decoding processes that an item ended.", "", {"": float(core.decoders.killed)}),
        ("relax_paused", "Whether the service is paused.", "", {"": float(not core.gate.is_set())}),
        ("relax_requests_reading", "Large requests that wait for a thread.", "", {"": float(core.work.waiting)}),
        *core.refusals.readings(),
        ("relax_rollouts_playing", "Rollouts under way.", "", {"": float(rolling.playing)}),
        ("relax_engine_up", "Whether an engine answers.", "engine", {e["url"]: float(e["up"]) for e in engines}),
        ("relax_engine_calls", "Calls in flight.", "engine", {e["url"]: float(e["running"]) for e in engines}),
    ]


def _errors(app: FastAPI) -> None:
    """Every error in OpenAI's shape."""

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, RelaxError)
        return error_response(as_api_error(error))

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(invalid(error.errors()))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(ApiError(error.status_code, message, "http_error", headers=dict(error.headers or {})))

    app.add_exception_handler(RelaxError, ours)
    app.add_exception_handler(RequestValidationError, refused)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, bug)


async def bug(request: Request, error: Exception) -> Response:
    """The answer to a request in which the service failed."""
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(ApiError(500, f"the service failed: {type(error).__name__}; see its log", "internal_error"))

"""The service's HTTP routes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route

from relax_sdk.errors import RelaxError
from relax_server.api.chat_route import ChatRoute
from relax_server.api.core import ServiceCore
from relax_server.api.errors import ApiError, as_api_error, bad
from relax_server.api.openai_responses import ResponsesRoute
from relax_server.api.rollouts import RolloutHub
from relax_server.api.routes import health, keys, results, rollouts, sessions
from relax_server.api.sessions import SessionHub
from relax_server.api.wire import error_response, json_response

logger = logging.getLogger(__name__)


def make_app(core: ServiceCore, closing: Callable[[], Any] | None = None) -> FastAPI:
    """The application.

    Args:
        core: the parts it is made of.
        closing: awaited when it ends, before the parts are let go.
    """
    hub, rolling = SessionHub(core), RolloutHub(core)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await rolling.resume()
        yield
        core.draining = True
        await rolling.close()
        await hub.drain(0.0)
        if closing is not None:
            await closing()
        await core.close()

    app = FastAPI(title="Relax Gym", version="1", lifespan=lifespan, docs_url="/docs", redoc_url=None)
    app.state.core, app.state.hub, app.state.rollouts = core, hub, rolling
    _errors(app)

    for module in (health, sessions, rollouts, results, keys):
        app.include_router(module.router)

    async def models(request: Request) -> Response:
        model = {"id": core.config.model, "object": "model", "created": 0, "owned_by": "relax"}
        return json_response({"object": "list", "data": [model]})

    for path, route in (("chat/completions", ChatRoute(core, hub)), ("responses", ResponsesRoute(core, hub))):
        for base in ("/v1/sessions/{id}/openai/v1", "/v1/openai/v1"):
            app.router.routes.append(Route(f"{base}/{path}", route.handle, methods=["POST"]))
            app.router.routes.append(Route(f"{base}/models", models, methods=["GET"]))
    return app


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

"""All that stands before the application, in its order; and the routes that are asked for most."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from fastapi.responses import Response
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Match, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from relax_server.api.core import ServiceCore
from relax_server.api.door.bodies import BoundedBodies
from relax_server.api.door.callers import KnownCallers
from relax_server.api.door.pace import PacedRefusals
from relax_server.api.door.prefix import RootPath, WholePath
from relax_server.api.logs import RequestLog
from relax_server.api.sessions import SessionHub
from relax_server.gateway.browsers import OwnPages

Fails = Callable[[Request, Exception], Awaitable[Response]]


class Called:
    """The endpoint of a route, without what Starlette puts around one to answer errors: it answers its own.

    Args:
        route: whose endpoint is a coroutine function from a request to an answer.
        failed: answers a request if the endpoint raises after all.
    """

    def __init__(self, route: Route, failed: Fails) -> None:
        self._endpoint: Callable[[Request], Awaitable[Response]] = route.endpoint
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            response = await self._endpoint(request)
        except ClientDisconnect:  # in the middle of its body; nobody waits for an answer
            return
        except Exception as error:
            response = await self._failed(request, error)
        await response(scope, receive, send)


class Shortcut:
    """Routes that are tried before the application's, and before all that those need.

    Args:
        app: where everything else goes.
        routes: whose endpoints answer their own errors.
        failed: answers a request whose endpoint did not.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[Route | WebSocketRoute], failed: Fails) -> None:
        self.app = app
        self._routes = [(route, route.app if isinstance(route, WebSocketRoute) else Called(route, failed)) for route in routes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            for route, handle in self._routes:
                match, found = route.matches(scope)
                if match is Match.FULL:
                    scope.update(found)
                    await handle(scope, receive, send)
                    return
        await self.app(scope, receive, send)


def in_front(
    app: ASGIApp, routes: Sequence[Route | WebSocketRoute], failed: Fails, core: ServiceCore, hub: SessionHub
) -> ASGIApp:
    """The application with all that stands before it.

    Args:
        app: the application.
        routes: that are tried first; they look at the key themselves, before they read the body.
        failed: answers a request in which an endpoint of `routes` failed.
        core: of the service.
        hub: of its sessions.
    """
    config = core.config
    whole = WholePath(app) if config.root_path else app
    inner: ASGIApp = Shortcut(KnownCallers(whole, core, hub), routes, failed)
    inner = BoundedBodies(inner, large=config.max_body, small=config.door.json_bytes)
    inner = OwnPages(inner)
    if config.hosts:  # a web page must not reach it under a name of its own
        inner = TrustedHostMiddleware(inner, allowed_hosts=config.hosts)
    inner = RequestLog(PacedRefusals(inner, core, hub))
    return RootPath(inner, config.root_path) if config.root_path else inner

"""The path under which a proxy serves the service: the proxy takes it away, and what the service tells begins with it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

_TYPES = ("http", "websocket")


class RootPath:
    """Tells the application the path that the proxy took away; URLs of the service begin with it.

    All that stands behind it up to `WholePath` sees paths without it.

    Args:
        app: where requests go on to.
        root: begins with a slash, and does not end with one.
    """

    def __init__(self, app: ASGIApp, root: str) -> None:
        self.app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in _TYPES:
            scope["root_path"] = self._root
        await self.app(scope, receive, send)


class WholePath:
    """Gives the application paths as clients asked for them, as ASGI wants it: the root path and what follows.

    Args:
        app: a Starlette application, which takes the root path away again to find routes, and leaves it in redirects.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in _TYPES:
            scope = {**scope, "path": scope["root_path"] + scope["path"]}
        await self.app(scope, receive, send)

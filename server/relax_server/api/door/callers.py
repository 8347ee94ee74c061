"""Whether a request shows a key that works, before its body is read."""

from __future__ import annotations

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from relax_sdk.errors import RelaxError
from relax_server.api.auth import known_caller
from relax_server.api.core import ServiceCore
from relax_server.api.sessions import SessionHub
from relax_server.gateway.errors import as_api_error
from relax_server.gateway.wire import refuse

OPEN = frozenset(path for name in ("healthz", "readyz", "metrics") for path in (f"/{name}", f"/v1/{name}"))
"""Paths that are answered without a key: they show nothing of anybody."""
VIEW = "/view/"
"""Where the viewer is, which gives its page to anybody, and looks at the key itself before it tells of a run."""


class KnownCallers:
    """Refuses requests without a key that works, of a caller or of a session; what it may do is looked at later.

    Args:
        app: where requests go on to.
        core: of the service.
        hub: of its sessions.
    """

    def __init__(self, app: ASGIApp, core: ServiceCore, hub: SessionHub) -> None:
        self.app, self._core, self._hub = app, core, hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN and not f"{scope['path']}/".startswith(VIEW):
            try:
                await known_caller(HTTPConnection(scope), self._core, self._hub)
            except RelaxError as error:
                await refuse(as_api_error(error), scope, receive, send)
                return
        await self.app(scope, receive, send)

"""The guard as a middleware of aiohttp."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from relax_server.guard.inside.relax_guard import Guard


def guarded(guard: Guard) -> Middleware:
    """A middleware that answers what `guard` refuses, before a body is read."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = guard.refusal(request.method, request.path, request.headers)
        if refusal is None:
            return await handler(request)
        return web.Response(body=refusal.body, status=refusal.status, headers=refusal.headers)

    return middleware

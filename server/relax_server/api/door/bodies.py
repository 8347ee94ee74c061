"""Sizes of bodies: a request that is too large is refused before anything of it is kept."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relax_server.gateway.errors import ApiError
from relax_server.gateway.wire import refuse

LARGE_ENDS = ("/chat/completions", "/responses", "/step")
LARGE_BEGINS = ("/v1/media/", "/v1/envs")


class BoundedBodies:
    """Refuses bodies over the limit of their route, also those that do not say how large they are.

    Args:
        app: where requests go on to.
        large: bytes where a body may carry media or code.
        small: bytes elsewhere.
    """

    def __init__(self, app: ASGIApp, large: int, small: int) -> None:
        self.app, self._large, self._small = app, large, min(small, large)

    def limit(self, path: str) -> int:
        """Bytes that the body of a request may have."""
        return self._large if path.endswith(LARGE_ENDS) or path.startswith(LARGE_BEGINS) else self._small

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        stated, chunked = 0, False
        for name, value in scope["headers"]:
            if name == b"content-length":
                stated = int(value) if value.isdigit() else 0
            elif name == b"transfer-encoding":
                chunked = True
        limit = self.limit(scope["path"])
        if stated > limit:
            message = f"the body has {stated} bytes; allowed for {scope['path'][:200]}: {limit}"
            await refuse(ApiError(413, message, "too_large"), scope, receive, send)
        elif chunked:
            await self._counted(limit, scope, receive, send)
        else:  # the server reads no more than was stated
            await self.app(scope, receive, send)

    async def _counted(self, limit: int, scope: Scope, receive: Receive, send: Send) -> None:
        size, over, answered = 0, False, False

        async def counted() -> Message:
            nonlocal size, over
            message = await receive()
            if message["type"] == "http.request":
                size += len(message.get("body", b""))
                over = over or size > limit
            return {"type": "http.disconnect"} if over else message

        async def told(message: Message) -> None:
            nonlocal answered
            if over and not answered:
                return  # of a body that nobody has read whole; the refusal follows
            answered = True
            await send(message)

        try:
            await self.app(scope, counted, told)
        except Exception:
            if not over or answered:
                raise
        if over and not answered:
            message = f"the body has more than {limit} bytes, as many as {scope['path'][:200]} allows"
            await refuse(ApiError(413, message, "too_large"), scope, receive, send)

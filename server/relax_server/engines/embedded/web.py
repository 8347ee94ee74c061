"""Plain HTTP of the embedded engine: JSON bodies, error bodies, event streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from relax_server.engines.embedded.core import RequestError
from relax_server.engines.embedded.sglang_json import UnknownSamplingKey

logger = logging.getLogger(__name__)


def json_response(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


async def json_body(request: web.Request) -> dict[str, Any]:
    raw = await request.read()
    if not raw:
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON ({error})") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {type(body).__name__}")
    return body


class EventStream:
    """A text/event-stream response that ends with `[DONE]`; the headers go out with the first event."""

    def __init__(self, request: web.Request) -> None:
        self.request = request
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

    async def __aenter__(self) -> EventStream:
        await self.response.prepare(self.request)
        return self

    async def __call__(self, body: Any) -> None:
        await self.response.write(b"data: " + orjson.dumps(body) + b"\n\n")

    async def __aexit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is None:
            await self.response.write(b"data: [DONE]\n\n")
            await self.response.write_eof()


@web.middleware
async def error_bodies(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except UnknownSamplingKey as error:
        return json_response({"error": str(error)}, 400)
    except RequestError as error:
        return _refusal(str(error), error.status)
    except web.HTTPException as error:
        return _refusal(error.text or error.reason, error.status)
    except (asyncio.CancelledError, ConnectionResetError):
        raise
    except Exception as error:
        logger.exception("%s failed", request.path)
        return _refusal(f"internal error: {type(error).__name__}: {error}", 500)


def _refusal(message: str, status: int) -> web.Response:
    return json_response({"error": {"message": message}}, status)

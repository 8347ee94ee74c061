"""HTTP on the way to and from the routes: keys and bodies are read, answers written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from relax_sdk.messages import Message
from relax_server.gateway.errors import ApiError
from relax_server.json_form import as_json


def bearer(request: HTTPConnection) -> str:
    """The key that a request shows; empty if none."""
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def read_body(request: Request, limit: int) -> bytes:
    """A request's body.

    Raises:
        ApiError: too large.
    """
    stated = request.headers.get("content-length", "0")
    if stated.isdigit() and int(stated) > limit:
        raise ApiError(413, f"the body has {stated} bytes; allowed: {limit}", "too_large")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise ApiError(413, f"the body has more than {limit} bytes", "too_large")
        parts.append(part)
    return b"".join(parts)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON, whatever was stored."""
    return Response(as_json(body), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    """An error as every route tells it."""
    return json_response(error.body, error.status, error.headers)


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error, and end the connection, as its body was not read."""
    error.headers["Connection"] = "close"
    await error_response(error)(scope, receive, send)


def on_wire(messages: Sequence[Message], form: str) -> list[dict[str, Any]]:
    """Messages as a client is sent them, media by `reference` or `inline`."""
    return [
        message.to_openai(lambda part: part.data_uri()) if form == "inline" else message.to_openai() for message in messages
    ]


def plain(value: Any) -> Any:
    """JSON data with what an environment may have put into `info` made plain, and NaN as null."""
    return orjson.Fragment(as_json(value))

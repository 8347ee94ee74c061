"""Between HTTP and the service: bodies read, answers and event streams written."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
from fastapi.responses import Response
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request

from relax_sdk.messages import MEDIA_SCHEME, Message
from relax_sdk.trajectory import Trajectory
from relax_server.api.errors import ApiError, bad
from relax_server.api.events import EventLog

PING_SECONDS = 15
"""Between signs of life on an event stream."""
_MARK = MEDIA_SCHEME.encode()


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


async def read_json(request: Request, limit: int) -> tuple[Any, int, bool]:
    """A request's body as JSON, its size, and whether it names media of the store.

    Raises:
        ApiError: too large, or not JSON.
    """
    body = await read_body(request, limit)
    try:
        return orjson.loads(body), len(body), _MARK in body
    except orjson.JSONDecodeError as error:
        raise bad(f"the body is not JSON: {error}", code="invalid_json") from error


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON, by orjson."""
    return Response(orjson.dumps(body), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    """An error as every route tells it."""
    return json_response(error.body, error.status, error.headers)


def on_wire(messages: Sequence[Message], form: str) -> list[dict[str, Any]]:
    """Messages as a client is sent them, media by `reference` or `inline`."""
    return [
        message.to_openai(lambda part: part.data_uri()) if form == "inline" else message.to_openai() for message in messages
    ]


def finished(trajectory: Trajectory) -> dict[str, Any]:
    fields = ("status", "reward", "rewards", "error")
    return {"trajectory_id": trajectory.id} | {name: getattr(trajectory, name) for name in fields}


def whole_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """All of a trajectory as JSON; routed experts are left out but for their shape."""
    fields = {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(trajectory) if f.name != "turns"}
    turns = []
    for turn in trajectory.turns:
        row = {f.name: getattr(turn, f.name) for f in dataclasses.fields(turn) if f.name != "routed_experts"}
        row["media"] = [dataclasses.asdict(ref) for ref in turn.media]
        row["weight_versions"] = [dataclasses.asdict(span) for span in turn.weight_versions]
        turns.append(row)
    return plain(fields | {"turns": turns})


def plain(value: Any) -> Any:
    """JSON data with what an environment may have put into `info` made plain, and NaN as null."""
    return orjson.Fragment(orjson.dumps(value, default=str, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS))


def follow(log: EventLog, topic: str, request: Request, ending: dict[str, Any] | None = None) -> Response:
    """A topic's events from the one after `Last-Event-ID` on; it ends after the last event of something that is over.

    Args:
        log: of events.
        topic: whose.
        request: of who follows.
        ending: how it ended, if it is over: told also when its events were pruned.
    """
    last = request.headers.get("last-event-id", "0")
    if not last.isdigit() or len(last) > 18:
        raise bad(f"Last-Event-ID = {last!r}; allowed: the id of an event", "Last-Event-ID")

    def shown(kind: str, data: dict[str, Any], seq: int) -> ServerSentEvent:
        return ServerSentEvent(data=orjson.dumps(data).decode(), event=kind, id=str(seq))

    async def events() -> AsyncIterator[ServerSentEvent]:
        seq, source = int(last), log.follow(topic, int(last)) if ending is None else log.rest(topic, int(last))
        async for event in source:
            yield shown(event.kind, event.data, seq := event.seq)
            if event.kind == "finished":
                return
        if ending is not None:
            yield shown("finished", ending, seq)

    return EventSourceResponse(events(), ping=PING_SECONDS)

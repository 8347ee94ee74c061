"""A topic's events as server-sent events, from any number on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import Response
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request

from relax_server.api.auth import watched
from relax_server.api.core import ServiceCore
from relax_server.gateway.errors import bad
from relax_server.json_form import json_text

PING_SECONDS = 15
"""Seconds between signs of life on an event stream."""


def follow(core: ServiceCore, topic: str, request: Request, ending: dict[str, Any] | None = None) -> Response:
    """A topic's events from the one after `Last-Event-ID` on; it ends after the last event of something that is over, and with
    `revoked` when the key that follows works no more.

    Args:
        core: of the service.
        topic: whose.
        request: of who follows.
        ending: how it ended, if it is over: told also when its events were pruned.
    """
    last = request.headers.get("last-event-id", "0")
    if not last.isdigit() or len(last) > 18:
        raise bad(f"Last-Event-ID = {last!r}; allowed: the id of an event", "Last-Event-ID")

    def shown(kind: str, data: dict[str, Any], seq: int) -> ServerSentEvent:
        return ServerSentEvent(data=json_text(data), event=kind, id=str(seq))

    async def events() -> AsyncIterator[ServerSentEvent]:
        seq, log, revoked = int(last), core.events, list[str]()

        def ended(why: str) -> None:
            revoked.append(why)
            log.wake(topic)

        over = core.watch.use(watched(request), ended)
        try:
            source = log.follow(topic, seq, lambda: bool(revoked)) if ending is None else log.rest(topic, seq)
            async for event in source:
                yield shown(event.kind, event.data, seq := event.seq)
                if event.kind == "finished":
                    return
                if revoked:
                    break
            if revoked:
                yield shown("revoked", {"error": revoked[0]}, seq)
            elif ending is not None:
                yield shown("finished", ending, seq)
        finally:
            over()

    return EventSourceResponse(events(), ping=PING_SECONDS)

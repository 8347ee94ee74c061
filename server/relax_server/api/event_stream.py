"""A topic's events as server-sent events, from any number on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi.responses import Response
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request

from relax_sdk.errors import RelaxError
from relax_server.api.auth import watched
from relax_server.api.core import ServiceCore
from relax_server.gateway.errors import bad
from relax_server.json_form import json_text

PING_SECONDS = 15
"""Seconds between signs of life on an event stream."""
LOOK_SECONDS = 15.0
"""Seconds between two looks whether what is followed is over: a server that dies may have saved its end and told nobody."""

Ending = dict[str, Any] | None
"""How something ended; None: it is not over."""


def follow(
    core: ServiceCore,
    topic: str,
    request: Request,
    ending: Ending = None,
    look: Callable[[], Awaitable[Ending]] | None = None,
) -> Response:
    """A topic's events from the one after `Last-Event-ID` on; it ends after the last event of something that is over, and with
    `revoked` when the key that follows works no more.

    Args:
        core: of the service.
        topic: whose.
        request: of who follows.
        ending: how it ended, if it is over: told also when its events were pruned.
        look: finds out how it ended, asked every `LOOK_SECONDS` where another server may be what tells of it.
    """
    last = request.headers.get("last-event-id", "0")
    if not last.isdigit() or len(last) > 18:
        raise bad(f"Last-Event-ID = {last!r}; allowed: the id of an event", "Last-Event-ID")

    def shown(kind: str, data: dict[str, Any], seq: int) -> ServerSentEvent:
        return ServerSentEvent(data=json_text(data), event=kind, id=str(seq))

    async def events() -> AsyncIterator[ServerSentEvent]:
        seq, log, revoked, found = int(last), core.events, list[str](), [ending] if ending is not None else []

        def ended(why: str) -> None:
            revoked.append(why)
            log.wake(topic)

        async def watch(look: Callable[[], Awaitable[Ending]]) -> None:
            while not found:
                await asyncio.sleep(LOOK_SECONDS)
                with contextlib.suppress(RelaxError):  # the database is away; the next look may find it
                    found.extend(how for how in (await look(),) if how is not None)
            log.wake(topic)

        over = core.watch.use(watched(request), ended)
        looking = asyncio.create_task(watch(look)) if look is not None and not found else None
        try:
            for source in (log.follow(topic, seq, lambda: bool(revoked or found)), log.rest(topic, seq)):
                async for event in source:
                    if event.seq > seq:
                        yield shown(event.kind, event.data, seq := event.seq)
                    if event.kind == "finished":
                        return
                    if revoked:
                        break
                if revoked:
                    break
            if revoked:
                yield shown("revoked", {"error": revoked[0]}, seq)
            elif found:
                yield shown("finished", found[0], seq)
        finally:
            over()
            if looking is not None:
                looking.cancel()

    return EventSourceResponse(events(), ping=PING_SECONDS)

"""Requests of callers that are refused again and again wait, before anything is done for them."""

from __future__ import annotations

import ipaddress

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relax_server.api.core import ServiceCore
from relax_server.api.door.callers import OPEN
from relax_server.api.sessions import SessionHub
from relax_server.gateway.errors import ApiError
from relax_server.gateway.wire import bearer, refuse

BEGIN = ("/v1/sessions", "/v1/rollouts", "/v1/runs")
"""What is asked for here is refused, too, when a key has as much as it may: its other requests must not wait for that."""
NETWORK_BITS = 64
"""Bits of an IPv6 address that one attacker has all of the rest of."""


class PacedRefusals:
    """Holds back the requests of a caller that is refused too often; see `Refusals`.

    A caller is a key, or an address where none is shown that was ever seen to work: guesses slow down guesses, and nobody who
    comes from the same address with a key.

    Args:
        app: where requests go on to.
        core: of the service.
        hub: of its sessions.
    """

    def __init__(self, app: ASGIApp, core: ServiceCore, hub: SessionHub) -> None:
        self.app, self._core, self._hub, self._refusals = app, core, hub, core.refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN:
            await self.app(scope, receive, send)
            return
        refusals, accepted = self._refusals, False
        if refusals.slow:
            try:
                await refusals.turn(self.caller(scope))
            except ApiError as error:
                await _turn_away(error, scope, receive, send)
                return

        async def told(message: Message) -> None:
            nonlocal accepted
            kind = message["type"]
            if kind == "websocket.accept":
                accepted = True
            elif (kind == "websocket.close" and not accepted) or 400 <= message.get("status", 0) < 500:
                refusals.note(self.caller(scope))
            await send(message)

        await self.app(scope, receive, told)

    def caller(self, scope: Scope) -> str:
        """Who is charged for the refusal of a request."""
        secret = bearer(HTTPConnection(scope))
        session = self._hub.by_secret(secret) if secret else None
        key = session.key if session is not None else self._core.keys.seen(secret) if secret else None
        who = key.id if key is not None else _network(scope["client"][0] if scope.get("client") else "")
        return f"{who} begins" if scope["path"] in BEGIN else who


def _network(address: str) -> str:
    """The part of an address that tells callers from each other."""
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network((address.partition("%")[0], NETWORK_BITS), strict=False))
    except ValueError:
        return address


async def _turn_away(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await refuse(error, scope, receive, send)
        return
    await receive()
    await send({"type": "websocket.close", "code": 4429, "reason": "too many requests that are refused"})

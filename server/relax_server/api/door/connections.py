"""Connections to the service: how many there may be, and how long a client may take to say what it wants."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Literal, cast

import orjson
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from relax_server.api.door.limits import DoorLimits
from relax_server.api.door.unread import Unread
from relax_server.gateway.errors import ApiError

HEAD_BYTES = 64 << 10
"""Bytes of a request's line and headers."""
KEPT_SECONDS = 75
"""Seconds for which a connection stays open between two requests: longer than clients and proxies keep theirs (httpx 5 s,
aiohttp 15 s, nginx 60 s), as a request that is sent while its connection is closed here fails."""
LINGER_SECONDS, LINGERING = 1.0, 256
"""Seconds for which a refused connection stays half open, so that the client reads why; and how many do at once."""
Awaited = Literal["headers", "body"]
logger = logging.getLogger(__name__)


class Connections:
    """All open connections of the service. Belongs to one event loop.

    When there are as many as may be, the oldest one that asks for nothing is closed for the next one.

    Args:
        limits: that hold.
        allowed: connections at once.
        proxies: addresses and networks whose connections come from many clients, and are not limited one by one.
    """

    def __init__(self, limits: DoorLimits, allowed: int, proxies: Collection[str] = ()) -> None:
        self.limits, self.allowed = limits, allowed
        self.each = min(limits.connections_per_address, max(1, allowed * 3 // 4))
        """Connections of one address: it cannot have all."""
        self._proxies = [ipaddress.ip_network(proxy) for proxy in proxies]
        self.open: dict[asyncio.BaseTransport, tuple[str, GuardedHttp | None]] = {}
        """Addresses, and protocols of those that are no WebSockets; oldest first."""
        self.refused = 0
        self.unread = Unread(limits.read_seconds, limits.unread_bytes)
        self.lingering: set[asyncio.BaseTransport] = set()
        """Connections that were refused, whose clients may still read why."""
        self._by_address: Counter[str] = Counter()

    def enter(self, transport: asyncio.BaseTransport, address: str, protocol: GuardedHttp) -> None:
        """A connection was opened.

        Raises:
            ApiError: 503, there are too many; the connection was not counted.
        """
        if self._by_address[address] >= self.each and not self._is_proxy(address):
            self.refused += 1
            raise _full(f"{address} has {self.each} connections open, as many as one address may have; close some")
        if len(self.open) >= self.allowed and not self._evict():
            self.refused += 1
            raise _full(f"the service has {self.allowed} connections open, as many as it may have; try again")
        self.open[transport] = address, protocol
        self._by_address[address] += 1

    def upgraded(self, transport: asyncio.BaseTransport) -> None:
        """A connection became a WebSocket."""
        if transport in self.open:
            self.open[transport] = self.open[transport][0], None

    def leave(self, transport: asyncio.BaseTransport) -> None:
        """A connection ended; again changes nothing."""
        address, _ = self.open.pop(transport, (None, None))
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def _is_proxy(self, address: str) -> bool:
        return any(ipaddress.ip_address(address) in network for network in self._proxies)

    def _evict(self) -> bool:
        """Close the oldest connection that asks for nothing; False: all are at work."""
        for transport, (_, protocol) in self.open.items():
            if protocol is not None and protocol.idle:
                self.leave(transport)
                transport.close()
                return True
        return False

    def readings(self) -> list[tuple[str, str, str, dict[str, float]]]:
        """How many there are, for metrics."""
        return [
            ("relax_connections_open", "Connections that are open.", "", {"": float(len(self.open))}),
            ("relax_connections_refused", "Connections refused because there were too many.", "", {"": float(self.refused)}),
            ("relax_connections_unread", "Connections whose clients do not read.", "", {"": float(len(self.unread.held))}),
            ("relax_connections_cut", "Connections cut off as their clients did not read.", "", {"": float(self.unread.cut)}),
        ]

    def configure(self, config: Config, http: Callable[..., GuardedHttp] | None = None) -> Config:
        """Let a server's connections be counted here.

        Args:
            config: of the server.
            http: makes the protocol of a connection, given this and uvicorn's arguments; None: `GuardedHttp`.

        Returns:
            `config`.
        """
        config.timeout_keep_alive = KEPT_SECONDS
        config.http = cast(Any, functools.partial(http or GuardedHttp, self))
        config.ws = cast(Any, functools.partial(GuardedWebSocket, self))
        return config


class GuardedHttp(HttpToolsProtocol):
    """uvicorn's protocol, with time-outs for what a client sends, and a bound for headers.

    Args:
        around: all connections.
        arguments: uvicorn's own.
    """

    def __init__(self, around: Connections, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._around = around
        self._awaited: Awaited | None = "headers"
        """What of a request has still to come."""
        self._timer: asyncio.TimerHandle | None = None
        self._timed: Awaited | None = None
        """What the timer is for."""
        self._head_bytes = 0
        self._refused = False

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        try:
            self._around.enter(transport, self.client[0] if self.client else "", self)
        except ApiError as error:
            self._refuse(error)
            return
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._around.lingering.discard(self.transport)
        self._around.leave(self.transport)
        self._around.unread.resumed(self.transport)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._around.unread.paused(self.transport)

    def resume_writing(self) -> None:
        self._around.unread.resumed(self.transport)
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        super().data_received(data)
        if self.transport.get_protocol() is not self:  # it is a WebSocket now, which may say nothing for as long as it likes
            return
        if self._awaited == "headers":
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(ApiError(431, f"the headers have more than {HEAD_BYTES} bytes", "headers_too_large"))
                return
        if self._awaited is None and self.idle:  # bytes that begin no request must not hold the connection
            self._awaited = "headers"
        if self._awaited != self._timed:  # most requests come in one go, and need no timer
            self._arm()

    def on_message_begin(self) -> None:
        self._awaited, self._head_bytes = "headers", 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._awaited = "body"
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._awaited = None
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self._disarm()
        self._around.upgraded(self.transport)
        super().handle_websocket_upgrade()

    def _arm(self) -> None:
        """Give the client time for what is awaited."""
        self._disarm()
        if self._awaited is not None:
            limits, self._timed = self._around.limits, self._awaited
            seconds = limits.header_seconds if self._timed == "headers" else limits.body_seconds
            self._timer = self.loop.call_later(seconds, self._late, self._timed, seconds)

    def _disarm(self) -> None:
        self._timed = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self, what: Awaited, seconds: float) -> None:
        """The client took too long."""
        self._refuse(ApiError(408, f"the {what} of the request did not come within {seconds:g} s", "request_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer before the application could, and close."""
        self._disarm()
        self._refused = True
        if not self.transport.is_closing():
            if self.idle or not self.cycle.response_started:
                body = orjson.dumps(error.body)
                lines = [STATUS_LINE[error.status]]
                lines += [name + b": " + value + b"\r\n" for name, value in self.server_state.default_headers]
                lines += [f"{name}: {value}\r\n".encode() for name, value in error.headers.items()]
                lines += [b"content-type: application/json\r\nconnection: close\r\n"]
                lines += [f"content-length: {len(body)}\r\n\r\n".encode(), body]
                self.transport.write(b"".join(lines))
                self._linger()
            else:
                self.transport.close()
        self._around.leave(self.transport)
        logger.debug("a connection of %s was refused: %s", self.client, error)

    def _linger(self) -> None:
        """Close after a moment: closed at once, a client that is still sending would lose the answer."""
        lingering = self._around.lingering
        if self.transport.can_write_eof() and len(lingering) < LINGERING:
            lingering.add(self.transport)
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.abort)
        else:
            self.transport.close()


class GuardedWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's protocol of WebSockets, counted.

    Args:
        around: all connections.
        arguments: uvicorn's own.
    """

    def __init__(self, around: Connections, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._around = around

    def connection_lost(self, exc: Exception | None) -> None:
        self._around.leave(self.transport)
        self._around.unread.resumed(self.transport)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._around.unread.paused(self.transport)

    def resume_writing(self) -> None:
        self._around.unread.resumed(self.transport)
        super().resume_writing()


def _full(message: str) -> ApiError:
    return ApiError(503, message, "too_many_connections", headers={"Retry-After": "1"})

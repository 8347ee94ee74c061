"""Connections go to the worker that serves the request which comes next: the open socket itself, with what was read of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from relax_server.api.door.connections import HEAD_BYTES, Connections, GuardedHttp
from relax_server.api.workers.channel import Message, unavailable
from relax_server.api.workers.head import END, RequestHead, read_head
from relax_server.api.workers.place import WorkerPlace
from relax_server.api.workers.routing import Routing
from relax_server.gateway.errors import ApiError

CONNECTION = "connection"
SENT_SECONDS = 0.002
"""Seconds between two looks whether the answer before has left."""


class Handover:
    """Gives connections to other workers, and takes theirs. Belongs to one event loop.

    Args:
        place: of this worker.
    """

    def __init__(self, place: WorkerPlace) -> None:
        self._place, self._routing = place, Routing(place)
        self._make: Callable[[], asyncio.Protocol] | None = None
        self._early: list[Message] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        place.on(CONNECTION, self._taken)

    def worker(self, head: RequestHead) -> int | None:
        """The other worker that serves a request; None: this one does."""
        worker = self._routing.worker(head)
        return None if worker == self._place.index else worker

    def give(self, worker: int, connection: int, data: bytes) -> None:
        """Send an open socket to a worker, with what was read of it and not used.

        Raises:
            ApiError: 503, the worker is not there.
        """
        if not self._place.board.up(worker):
            raise unavailable(worker)
        self._place.send_file(worker, CONNECTION, data, connection)

    def begin(self, make: Callable[[], asyncio.Protocol]) -> None:
        """Take what others give, from now on.

        Args:
            make: makes the protocol of a connection, a `RoutedHttp`.
        """
        self._make = make
        early, self._early = self._early, []
        for message in early:
            self._taken(message)

    def _taken(self, message: Message) -> None:
        assert message.file is not None
        if self._make is None:
            self._early.append(message)
            return
        protocol = self._make()
        assert isinstance(protocol, RoutedHttp)
        protocol.bring(message.data)
        loop = asyncio.get_running_loop()
        connection = socket.socket(fileno=message.file)
        task = loop.create_task(_accept(loop, protocol, connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _accept(loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol, connection: socket.socket) -> None:
    try:
        await loop.connect_accepted_socket(lambda: protocol, connection)
    except OSError:  # the client has gone meanwhile
        connection.close()


class RoutedHttp(GuardedHttp):
    """`GuardedHttp` for one of several workers: each request is looked at before the parser sees it.

    The parser is given one request at a time, and is asked whether that is whole, so that a connection is given away only
    between two requests.

    Args:
        handover: to the other workers.
        around: all connections of this one.
        arguments: uvicorn's own.
    """

    def __init__(self, handover: Handover, around: Connections, *arguments: Any, **named: Any) -> None:
        super().__init__(around, *arguments, **named)
        self._handover = handover
        self._held = b""
        """What came and the parser was not given yet."""
        self._brought = False
        """Another worker has found that the first request is served here."""
        self._moving = False
        """The connection is another worker's as soon as the answer before has left."""
        self._inside = False
        """The parser is in the middle of a request."""
        self._left: int | None = 0
        """Bytes of its body that have not come; None: they come in chunks, so that only the parser knows."""
        self._tail = b""
        """The last bytes of a body in chunks that the parser was given."""

    def bring(self, data: bytes) -> None:
        """Begin with what another worker has read; before there is a connection."""
        self._held, self._brought = data, True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._held:
            self.loop.call_soon(self._go_on)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._held = self._held + data if self._held else data
        self._go_on()

    def on_message_begin(self) -> None:
        self._inside = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._inside = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._held:
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Do what can be done with what has come."""
        self._unset_keepalive_if_required()
        while self._held and not self._moving and not self._refused and not self.transport.is_closing():
            if self._inside:
                self._body()
            elif not self.idle:
                self.flow.pause_reading()  # until the request before is answered
                return
            elif not self._begin():
                return

    def _begin(self) -> bool:
        """Look at the next request; False: it does not begin here, or not yet, as its head is not whole."""
        head = read_head(self._held)
        if (head.size if head else len(self._held)) > HEAD_BYTES:
            self._refuse(ApiError(431, f"the headers have more than {HEAD_BYTES} bytes", "headers_too_large"))
            return False
        if head is None:
            self._await_head()
            return False
        worker = None if self._brought else self._handover.worker(head)
        self._brought = False
        if worker is not None:
            self._move(worker)
            return False
        self._left, self._tail = head.body, b""
        self._feed(head.size)
        return True

    def _await_head(self) -> None:
        self._awaited = "headers"
        if self._timed != "headers":
            self._arm()

    def _body(self) -> None:
        """Give the parser more of a request's body, and nothing of what follows it."""
        if self._left is None:  # a body in chunks ends with an empty line, as may some of them
            end = (self._tail + self._held).find(END)
            size = len(self._held) if end < 0 else end + len(END) - len(self._tail)
            self._tail = (self._tail + self._held[:size])[1 - len(END) :]
        else:
            size = min(self._left, len(self._held))
            self._left -= size
        self._feed(size)

    def _feed(self, size: int) -> None:
        data, self._held = self._held[:size], self._held[size:]
        super().data_received(data)
        if self._inside and self._left == 0 and self.transport.get_protocol() is self and not self._refused:
            self._refuse(ApiError(400, "the request has another size than it says", "invalid_request"))
        if self.transport.get_protocol() is not self:  # it is a WebSocket now
            self._held = b""

    def _move(self, worker: int) -> None:
        """Give the connection away, as soon as the answer before has left."""
        self._moving = True
        if self._refused or self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size():
            self.flow.pause_reading()
            self._await_head()
            self.loop.call_later(SENT_SECONDS, self._move, worker)
            return
        self.transport.pause_reading()
        try:
            self._handover.give(worker, self.transport.get_extra_info("socket").fileno(), self._held)
        except ApiError as error:
            self._refuse(error)
            return
        self._held = b""
        self.transport.abort()

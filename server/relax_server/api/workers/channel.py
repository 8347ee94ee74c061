"""Messages between the processes of one service, with open files attached where a connection is handed over.

Each process has an inbox, a Unix socket whose other end all of them hold. What is sent to a process that has just ended waits
in its inbox for the one that takes its place.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from relax_sdk.errors import RelaxError
from relax_server.gateway.errors import ApiError, as_api_error

logger = logging.getLogger(__name__)

INLINE = 64 << 10
"""Bytes of a message; what is longer travels as a file in memory."""
FRAME = INLINE + 4096
FILES = 2
"""Open files of one message at most: a connection, and a message that is long."""
ASK_SECONDS = 5.0
"""Seconds for an answer of another process."""
PING = "ping"
"""Asks whether a process is alive; each answers it."""
SUPERVISOR = -1
"""The number of the process that started the workers."""


@dataclass(frozen=True)
class Message:
    """What one process tells another."""

    kind: str
    sender: int
    """Number of the worker; `SUPERVISOR`: of the process that started them."""
    data: bytes
    file: int | None = None
    """An open file that came along; it belongs to whoever takes the message."""

    @property
    def body(self) -> dict[str, Any]:
        """`data` as JSON."""
        return orjson.loads(self.data)


Handler = Callable[[Message], dict[str, Any] | Awaitable[dict[str, Any] | None] | None]
"""Takes a message; what it returns answers those that ask."""


class Channel:
    """The way to the other processes. Belongs to one event loop.

    Args:
        own: number of this process.
        inbox: where messages come in.
        outboxes: the other ends of all inboxes, by number.
    """

    def __init__(self, own: int, inbox: socket.socket, outboxes: Mapping[int, socket.socket]) -> None:
        self.own = own
        self._inbox, self._outboxes = inbox, dict(outboxes)
        self._handlers: dict[str, Handler] = {PING: lambda _: None}
        self._asked: dict[str, tuple[int, asyncio.Future[dict[str, Any]]]] = {}
        self._numbers, self._prefix = itertools.count(), secrets.token_hex(4)
        self._tasks: set[asyncio.Future[Any]] = set()
        for end in (inbox, *self._outboxes.values()):
            end.setblocking(False)

    def listen(self) -> None:
        """Take messages from now on; those that came before wait."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._inbox.fileno(), self._readable)

    def close(self) -> None:
        """Take no more."""
        self._loop.remove_reader(self._inbox.fileno())
        for task in self._tasks:
            task.cancel()

    def on(self, kind: str, handler: Handler) -> None:
        """Let a function take all messages of a kind. What it awaits holds no other message up."""
        self._handlers[kind] = handler

    def send(self, to: int, kind: str, data: bytes, file: int | None = None, id: str = "") -> None:
        """Tell a process something; an open file is copied, so that the sender closes its own.

        Raises:
            ApiError: 503, its inbox is full, or there is no such process.
        """
        head = orjson.dumps({"kind": kind, "from": self.own, "id": id, "file": file is not None, "long": len(data) > INLINE})
        files = [] if file is None else [file]
        with contextlib.ExitStack() as stack:
            if len(data) > INLINE:
                files.append(memory := os.memfd_create("message"))
                stack.callback(os.close, memory)
                write_all(memory, data)
                data = b""
            try:
                socket.send_fds(self._outboxes[to], [head, b"\n", data], files)
            except (OSError, KeyError) as error:
                raise unavailable(to) from error

    async def ask(self, to: int, kind: str, body: Mapping[str, Any], seconds: float = ASK_SECONDS) -> dict[str, Any]:
        """Ask a process, and wait for what its handler returns.

        Raises:
            ApiError: what the handler raised; or 503, it does not answer in time, or ended meanwhile.
        """
        id = f"{self._prefix}-{next(self._numbers)}"
        answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._asked[id] = to, answer
        try:
            self.send(to, kind, orjson.dumps(body), id=id)
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError as error:
            raise unavailable(to) from error
        finally:
            del self._asked[id]

    def ended(self, process: int) -> None:
        """A process has ended: nobody waits for its answers any more."""
        for to, answer in list(self._asked.values()):
            if to == process and not answer.done():
                answer.set_exception(unavailable(process))

    def _readable(self) -> None:
        for _ in range(64):  # then others have their turn
            try:
                raw, files, _, _ = socket.recv_fds(self._inbox, FRAME, FILES)
            except (BlockingIOError, InterruptedError):
                return
            if not raw:  # all other processes have ended
                self._loop.remove_reader(self._inbox.fileno())
                return
            try:
                self._take(raw, files)
            except Exception:
                logger.exception("a message of another process of the service was lost")
                close_all(files)

    def _take(self, raw: bytes, files: list[int]) -> None:
        line, _, data = raw.partition(b"\n")
        head = orjson.loads(line)
        if head["long"]:
            with os.fdopen(files.pop(), "rb") as memory:
                memory.seek(0)
                data = memory.read()
        message = Message(head["kind"], head["from"], data, files[0] if head["file"] else None)
        if message.kind == "answer":
            self._answered(head["id"], message.body)
            return
        self._carry_out(message, head["id"])

    def _answered(self, id: str, body: dict[str, Any]) -> None:
        _, answer = self._asked.get(id, (0, None))
        if answer is None or answer.done():
            return
        if "error" in body:
            answer.set_exception(ApiError(**body["error"]))
        else:
            answer.set_result(body["result"])

    def _carry_out(self, message: Message, id: str) -> None:
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise KeyError(f"nobody takes messages of kind {message.kind!r}")
        try:
            result = handler(message)
        except RelaxError as error:
            self._answer(message, id, error=error)
            return
        if isinstance(result, Awaitable):
            task = asyncio.ensure_future(result)
            self._tasks.add(task)
            task.add_done_callback(lambda done: self._done(done, message, id))
        else:
            self._answer(message, id, result)

    def _done(self, task: asyncio.Future[Any], message: Message, id: str) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._answer(message, id, task.result())
        elif isinstance(error, RelaxError):
            self._answer(message, id, error=error)
        else:
            logger.error("what worker %d asked for failed", message.sender, exc_info=error)
            self._answer(message, id, error=ApiError(500, f"it failed: {type(error).__name__}", "internal_error"))

    def _answer(self, message: Message, id: str, result: dict[str, Any] | None = None, error: RelaxError | None = None) -> None:
        if not id:
            if error is not None:
                logger.warning("what worker %d told could not be heeded: %s", message.sender, error)
            return
        body: dict[str, Any] = {"result": result or {}}
        if error is not None:
            told = as_api_error(error)
            body = {"error": {"status": told.status, "message": str(told), "code": told.code, "param": told.param}}
        with contextlib.suppress(ApiError):  # it waits no longer than it said
            self.send(message.sender, "answer", orjson.dumps(body), id=id)


def unavailable(process: int) -> ApiError:
    """The answer to what needs a process that is not there."""
    message = f"worker {process} of the service, which this belongs to, does not answer just now; try again"
    return ApiError(503, message, "worker_unavailable", headers={"Retry-After": "1"})


def inboxes(numbers: Iterable[int]) -> dict[int, tuple[socket.socket, socket.socket]]:
    """Inboxes for processes: by number the end that is read, and the one that is written."""
    return {number: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for number in numbers}


def write_all(file: int, data: bytes) -> None:
    """Write to an open file, however much it takes at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def close_all(files: Sequence[int] | array.array[int]) -> None:
    """Close open files that nobody took."""
    for file in files:
        with contextlib.suppress(OSError):
            os.close(file)

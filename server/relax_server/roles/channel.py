"""Messages between a parent and the processes it starts: pickled, over a socket pair where both are on one machine."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

import cloudpickle


def pack(message: Any) -> bytes:
    """A message as bytes; classes from scripts and notebooks travel by value.

    A role's first message brings along where modules are found, for those that lie beside the user's script.
    """
    first = any(getattr(message, name, None) is not None for name in ("spec", "job"))
    return cloudpickle.dumps((sys.path if first else None, cloudpickle.dumps(message)))


def unpack(data: bytes) -> Any:
    """The message in what `pack` gave."""
    paths, body = pickle.loads(data)
    if paths is not None:  # modules beside the user's script must be importable before the message is read
        sys.path[:] = list(dict.fromkeys([*sys.path, *paths]))
    return pickle.loads(body)


class Outlet(Protocol):
    """Where a role sends its messages."""

    def send(self, message: Any) -> None: ...


class Channel:
    """One end. `send` may be called from any thread; received messages go to `on_message` in a thread of their own."""

    def __init__(self, fd: int) -> None:
        self._connection = Connection(fd)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @staticmethod
    def pair() -> tuple[Channel, int]:
        """The parent's end, and the file descriptor to pass to the child."""
        ours, theirs = socket.socketpair()
        os.set_inheritable(theirs.fileno(), True)
        return Channel(ours.detach()), theirs.detach()

    def send(self, message: Any) -> None:
        """Send a dataclass.

        Raises:
            OSError: the other end is gone.
        """
        data = pack(message)
        with self._lock:
            self._connection.send_bytes(data)

    def receive(self) -> Any:
        """Wait for the next message.

        Raises:
            EOFError: the other end is gone.
        """
        return unpack(self._connection.recv_bytes())

    def listen(self, on_message: Callable[[Any], None], on_close: Callable[[], None]) -> None:
        """Begin to receive in a thread."""

        def loop() -> None:
            while True:
                try:
                    message = self.receive()
                except (EOFError, OSError):
                    on_close()
                    return
                on_message(message)

        self._thread = threading.Thread(target=loop, name="channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close this end; the other one then sees the end."""
        with self._lock:
            self._connection.close()

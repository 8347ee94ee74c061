"""Messages between a parent and the processes it starts: pickled over a socket pair."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle


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
        """Send a dataclass; classes from scripts and notebooks travel by value.

        Raises:
            OSError: the other end is gone.
        """
        data = cloudpickle.dumps((sys.path if getattr(message, "spec", None) is not None else None, None))
        body = cloudpickle.dumps(message)
        with self._lock:
            self._connection.send_bytes(data)
            self._connection.send_bytes(body)

    def receive(self) -> Any:
        """Wait for the next message.

        Raises:
            EOFError: the other end is gone.
        """
        paths, _ = pickle.loads(self._connection.recv_bytes())
        if paths is not None:  # modules beside the user's script must be importable before the message is read
            sys.path[:] = list(dict.fromkeys([*sys.path, *paths]))
        return pickle.loads(self._connection.recv_bytes())

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

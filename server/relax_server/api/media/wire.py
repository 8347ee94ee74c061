"""What the service and a process that decodes for it say to each other: an item and its bytes, and whether it was taken."""

from __future__ import annotations

import socket
import struct

import msgspec

from relax_sdk.media_formats import NOUNS, Kind
from relax_sdk.probing import MediaRef

READY = b"\1"
"""Said when the decoders are loaded and the limits hold, and in answer to a greeting."""
_GREETING = 255
_ITEM = struct.Struct("<BQ")
_ANSWER = struct.Struct("<I")
_KINDS: tuple[Kind, ...] = tuple(NOUNS)


class Checked(msgspec.Struct, omit_defaults=True):
    """What became of an item: the reference of one that was taken, or why it was refused."""

    ref: MediaRef | None = None
    refused: str = ""


def send_item(connection: socket.socket, kind: Kind, data: bytes) -> None:
    """Give an item to the process.

    Raises:
        OSError: the process is gone, or does not read on (`TimeoutError`).
    """
    connection.sendall(_ITEM.pack(_KINDS.index(kind), len(data)))
    connection.sendall(data)


def greet(connection: socket.socket) -> None:
    """Find out whether the process is there.

    Raises:
        EOFError, OSError: it is not.
    """
    connection.sendall(_ITEM.pack(_GREETING, 0))
    receive(connection, len(READY))


def receive_item(connection: socket.socket) -> tuple[Kind, bytes]:
    """The next item; greetings before it are answered.

    Raises:
        EOFError: the service is gone.
    """
    while True:
        kind, size = _ITEM.unpack(receive(connection, _ITEM.size))
        if kind != _GREETING:
            return _KINDS[kind], receive(connection, size)
        connection.sendall(READY)


def send_answer(connection: socket.socket, answer: Checked) -> None:
    """Tell what became of the item."""
    body = msgspec.json.encode(answer)
    connection.sendall(_ANSWER.pack(len(body)) + body)


def receive_answer(connection: socket.socket) -> Checked:
    """What became of the item.

    Raises:
        EOFError, OSError: the process is gone, or does not answer (`TimeoutError`).
    """
    (length,) = _ANSWER.unpack(receive(connection, _ANSWER.size))
    try:
        return msgspec.json.decode(receive(connection, length), type=Checked)
    except msgspec.MsgspecError as error:
        raise EOFError(f"its answer cannot be read ({error})") from error


def receive(connection: socket.socket, size: int) -> bytes:
    """Exactly so many bytes.

    Raises:
        EOFError, OSError: the other side is gone, or is silent (`TimeoutError`).
    """
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        n = connection.recv_into(view[got:])
        if n == 0:
            raise EOFError("the other side is gone")
        got += n
    return bytes(data)

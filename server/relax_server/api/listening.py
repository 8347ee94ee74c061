"""The address that a service listens at."""

from __future__ import annotations

import socket

from relax_sdk.errors import ConfigError
from relax_server.api.settings import ServiceConfig


def listen(config: ServiceConfig) -> socket.socket:
    """The socket, bound before anything slow is done.

    Raises:
        ConfigError: taken, or not an address of this machine.
    """
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        # With the protocol named, asyncio sets TCP_NODELAY; without, streamed tokens wait 40 ms for each other.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(4096)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {config.host}:{config.port} ({error.strerror}); name another with --port"
        ) from error
    return listener


def address(listener: socket.socket) -> str:
    """The URL for people: `http://HOST:PORT`."""
    host, port = listener.getsockname()[:2]
    return f"http://{host}:{port}"


def near_address(listener: socket.socket) -> str:
    """`HOST:PORT` for programs of this machine."""
    host, port = listener.getsockname()[:2]
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(host), str(host))
    return f"{f'[{near}]' if ':' in near else near}:{port}"

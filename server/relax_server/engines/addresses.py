"""Addresses of engines, and which of them a run or a service may be told to use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from relax_sdk.config import EngineKind
from relax_sdk.errors import ConfigError
from relax_server.guard import is_loopback


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine answers, what it is, and what it wants to be shown."""

    url: str
    kind: EngineKind
    token: str = field(default="", repr=False)
    """Sent with every call; empty: none is."""
    external: bool = False
    """Somebody else started it; it is sent the bytes of media, as it cannot read our files."""


def check_address(url: str, hosts: Sequence[str] = ()) -> str:
    """The URL of an engine as it is kept.

    Args:
        url: such as `http://127.0.0.1:30000`.
        hosts: allowed besides this machine's own loopback address.

    Returns:
        `scheme://host:port`.

    Raises:
        ConfigError: not such a URL, or of a host that is not allowed.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"url = {url!r}: {error}") from error
    plain = not (parts.path.rstrip("/") or parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme not in ("http", "https") or not host or port is None or not plain:
        raise ConfigError(f"url = {url!r}; allowed: http://HOST:PORT, with nothing behind it")
    if not is_loopback(host) and host not in hosts:
        allowed = ", ".join(hosts) or "none"
        raise ConfigError(f"url = {url!r}: {host} is not this machine; other hosts that may be used here: {allowed}")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"

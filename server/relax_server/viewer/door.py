"""Who may look, where a server shows files of its user: programs and browsers of this machine, or who has the key."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

from starlette.requests import HTTPConnection

from relax_sdk.errors import ConfigError
from relax_server.gateway.errors import ApiError
from relax_server.gateway.wire import bearer
from relax_server.guard import is_loopback
from relax_server.viewer.base import Source

LEAST_KEY = 16
"""Characters of a key that people may not guess."""


class OneKey:
    """Lets in who shows the one key, or anybody where there is none.

    Args:
        source: what is seen then.
        host: the address that the server listens at.
        key: the key; None: none is wanted, which is for addresses of this machine alone.

    Raises:
        ConfigError: other machines could look without a key, or the key is short.
    """

    def __init__(self, source: Source, host: str, key: str | None) -> None:
        if key is None and not is_loopback(host):
            raise ConfigError(
                f"host = {host}: other machines could see all of these runs; give a key with --key, or stay at 127.0.0.1"
            )
        if key is not None and len(key) < LEAST_KEY:
            raise ConfigError(f"a key of {len(key)} characters can be guessed; allowed: {LEAST_KEY} or more")
        self._source, self._digest = source, None if key is None else _digest(key)

    async def enter(self, request: HTTPConnection) -> Source:
        """See `Door.enter`.

        Raises:
            ApiError: 401, the caller shows no key, or a wrong one.
        """
        if self._digest is not None and not hmac.compare_digest(_digest(bearer(request)), self._digest):
            message = "this viewer wants its key: send `Authorization: Bearer <key>`"
            raise ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return self._source

    async def wants_key(self) -> bool:
        """See `Door.wants_key`."""
        return self._digest is not None


def hosts(host: str) -> list[str]:
    """Names that the `Host` header of a request may have: a page of another site may not reach it under a name of its own."""
    if host in ("0.0.0.0", "::"):  # all addresses of the machine; the key is what protects it
        return ["*"]
    return [host, f"[{host}]", "127.0.0.1", "localhost", "[::1]"] if is_loopback(host) or _is_address(host) else [host]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()

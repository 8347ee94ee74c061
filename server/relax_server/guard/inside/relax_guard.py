"""The rules by which a server lets somebody in: its token, a name of this machine, no browser, JSON only.

A token alone would do against other users of the machine. The other rules are for web pages: a browser sends what a page tells
it to any address that it reaches, under any name (DNS rebinding), and for plain content types asks no server before.

Of the standard library only, as it is imported in the environments of SGLang and vLLM, too.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

TOKEN = "RELAX_ENGINE_TOKEN"
"""Environment variable with the token of an engine: of the one that is started, or of one that runs elsewhere."""
ADDRESS = "RELAX_ENGINE_ADDRESS"
"""Environment variable with the address that an engine listens on."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def new_token() -> str:
    """A token that nobody can guess: 256 random bits."""
    return f"rle_{secrets.token_urlsafe(32)}"


def is_loopback(host: str) -> bool:
    """Whether an address or a name is one by which a machine reaches only itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def hosts_of(address: str) -> frozenset[str]:
    """Names by which a server may be called that listens on an address; empty: by any, as other machines have theirs for it."""
    return frozenset({address, "127.0.0.1", "localhost", "::1"}) if is_loopback(address) else frozenset()


@dataclass(frozen=True)
class Refusal:
    """The answer to a request that is not let in."""

    status: int
    code: str
    message: str

    @property
    def body(self) -> bytes:
        """JSON, as OpenAI's clients expect errors."""
        kind = {401: "authentication_error", 403: "permission_error"}.get(self.status, "invalid_request_error")
        return json.dumps({"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}).encode()

    @property
    def headers(self) -> dict[str, str]:
        more = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return {"Content-Type": "application/json", **more}


@dataclass(frozen=True)
class Guard:
    """The rules of one server."""

    token: str | None = field(default=None, repr=False)
    """Shown by callers as `Authorization: Bearer TOKEN`; None: each route asks for a key of its own."""
    hosts: frozenset[str] = frozenset()
    """Names that the `Host` header may have, from `hosts_of`; empty: any."""
    wanted: str = "the token of this server"
    """The token in words, and where a caller finds it."""
    open_paths: frozenset[str] = frozenset({"/health"})
    """Paths that are answered without the token."""

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """Why a request is not let in; None: it is.

        Args:
            method: of HTTP; GET for a WebSocket.
            path: without query.
            headers: by their names in lower case, or a mapping to which case is the same.
        """
        host = _name(headers.get("host", ""))
        if self.hosts and host not in self.hosts:
            return Refusal(400, "invalid_host", f"this server is not {host!r}; call it {' or '.join(sorted(self.hosts))}")
        if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
            return Refusal(403, "browser_refused", "this server is not for web pages: requests with an Origin are refused")
        if self.token is not None and path not in self.open_paths and not self._shown(headers.get("authorization", "")):
            return Refusal(401, "unauthorized", f"Authorization: Bearer TOKEN is wanted, with {self.wanted}")
        if _has_body(headers) and _media_type(headers) != "application/json":
            return Refusal(415, "unsupported_media_type", "a body must be JSON: Content-Type: application/json")
        return None

    def _shown(self, authorization: str) -> bool:
        scheme, _, shown = authorization.partition(" ")
        assert self.token is not None
        given = shown.strip().encode(errors="surrogateescape")
        return scheme.lower() == "bearer" and hmac.compare_digest(given, self.token.encode())


class GuardedApp:
    """An ASGI application behind a guard.

    Args:
        app: what is guarded.
        guard: its rules.
    """

    def __init__(self, app: App, guard: Guard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            refusal = self._guard.refusal(scope.get("method", "GET"), scope["path"], headers)
            if refusal is not None:
                await _refuse(scope, send, refusal)
                return
        await self._app(scope, receive, send)


class EngineGuard(GuardedApp):
    """The middleware of an engine that is not ours, which was started with `RELAX_ENGINE_TOKEN`.

    Args:
        app: the engine.
    """

    def __init__(self, app: App) -> None:
        super().__init__(app, Guard(os.environ[TOKEN], hosts_of(os.environ[ADDRESS]), "the token that it was started with"))


async def _refuse(scope: Scope, send: Send, refusal: Refusal) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": refusal.message[:120]})
        return
    headers = [(name.lower().encode(), value.encode()) for name, value in refusal.headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": refusal.body})


def _name(host: str) -> str:
    """A `Host` header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _has_body(headers: Mapping[str, str]) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _media_type(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()

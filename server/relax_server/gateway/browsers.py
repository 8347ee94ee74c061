"""What a web page may do with the service: nothing, unless the service itself sent the page.

A page of another site can send requests to any address that its visitor reaches, this service included. Browsers say where a
request comes from (`Origin`, `Sec-Fetch-Site`), and let a page send only a few content types without asking first.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from relax_server.gateway.errors import ApiError
from relax_server.gateway.wire import refuse

CONTENT_POLICY = "; ".join(
    (
        "default-src 'self'",
        "img-src 'self' data: blob:",
        "media-src 'self' blob:",
        "style-src 'self' 'unsafe-inline'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Content-Security-Policy", CONTENT_POLICY),
]
"""Sent with every answer."""
SIMPLE = (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data", b"")
"""Content types that any page may send without asking; nothing here is sent as one of them."""
SAFE = ("GET", "HEAD", "OPTIONS")
OWN = (b"same-origin", b"none")
"""What `Sec-Fetch-Site` is for a page of the service's own, and for what a person typed."""
PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


class OwnPages:
    """Refuses requests that a page of another site makes a browser send, and bodies of a kind that such a page could send.

    Args:
        app: where requests go on to.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = _http(scope)
            if error is not None:
                await refuse(error, scope, receive, send)
                return
        elif scope["type"] == "websocket" and _foreign(_headers(scope), scope["scheme"]):
            await receive()
            await send({"type": "websocket.close", "code": 4403, "reason": "a page of another site may not connect"})
            return
        await self.app(scope, receive, send)


def _headers(scope: Scope) -> dict[bytes, bytes]:
    return dict(scope["headers"])


def _http(scope: Scope) -> ApiError | None:
    """Why a request is refused; None: it is not."""
    headers, safe = _headers(scope), scope["method"] in SAFE
    if _foreign(headers, scope["scheme"]) and not (safe and headers.get(b"sec-fetch-mode") == b"navigate"):
        return ApiError(403, "a web page of another site may not call this service", "foreign_page")
    if safe or not _has_body(headers):
        return None
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind in SIMPLE:
        named = f"Content-Type: {kind.decode('latin-1')}" if kind else "a body without a Content-Type"
        wanted = "application/json, or the type of the media"
        return ApiError(415, f"{named} is not taken; send {wanted}", "unsupported_media_type", "Content-Type")
    return None


def _has_body(headers: dict[bytes, bytes]) -> bool:
    return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers


def _foreign(headers: dict[bytes, bytes], scheme: str) -> bool:
    """Whether a page of another site is behind a request."""
    if headers.get(b"sec-fetch-site", b"none") not in OWN:
        return True
    origin = headers.get(b"origin")
    return origin is not None and _place(origin, "") != _place(b"//" + headers.get(b"host", b""), scheme)


def _place(url: bytes, scheme: str) -> tuple[str | None, int | None] | None:
    """Host and port of an origin; None: it has none."""
    try:
        parts = urlsplit(url.decode("latin-1"))
        return (parts.hostname, parts.port or PORTS.get(parts.scheme or scheme)) if parts.hostname else None
    except ValueError:
        return None

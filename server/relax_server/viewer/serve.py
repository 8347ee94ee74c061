"""`relax view` as a server: over the files of the user who started it, for this machine, or for who has the key."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import typer
import uvicorn
from starlette.applications import Starlette
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import RedirectResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from relax_sdk.errors import ConfigError
from relax_server.gateway.browsers import HEADERS, OwnPages
from relax_server.viewer.app import ViewerApp
from relax_server.viewer.base import Source
from relax_server.viewer.built import STATIC
from relax_server.viewer.door import OneKey, hosts
from relax_server.viewer.folders import FolderSource
from relax_server.viewer.journals import Journals
from relax_server.viewer.pages import Pages

NEW_KEY = "new"
CLOSE_SECONDS = 1
"""Seconds for answers that are still being sent when it is told to end."""
CONNECTIONS = 512
"""Connections at once; more are answered 503."""


def serve(paths: Sequence[Path], host: str, port: int, key: str | None, open_page: bool) -> None:
    """Show runs until interrupted.

    Args:
        paths: as in `FolderSource`.
        host: address to listen at.
        port: 0 picks a free one.
        key: what callers must show; `new` makes one; None: nothing.
        open_page: open the page in a browser.

    Raises:
        ConfigError: the port is taken, a path is a file, or other machines could look without a key.
    """
    made = secrets.token_urlsafe(24) if key == NEW_KEY else key
    journals = Journals()
    app = make_app(FolderSource(paths, journals), host, made)
    with contextlib.closing(journals), listen(host, port) as listener:
        url = _url(host, listener.getsockname()[1])
        named = ", ".join(map(str, paths))
        typer.echo(f"{url} shows {named}" + (f" · key {made}" if key == NEW_KEY else "") + " · Ctrl-C ends it")
        if open_page:
            webbrowser.open(url)
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            headers=HEADERS,
            ws="none",
            lifespan="off",
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(uvicorn.Server(settings).serve([listener]))


def make_app(source: Source, host: str = "127.0.0.1", key: str | None = None, static: Path = STATIC) -> ASGIApp:
    """The viewer with all that stands before it.

    Args:
        source: what is shown.
        host: address that it listens at.
        key: what callers must show; None: nothing.
        static: folder of the built page.

    Raises:
        ConfigError: other machines could look without a key.
    """
    viewer = ViewerApp(OneKey(source, host, key), Pages(), static, tells_all=True)

    async def to_page(request: object) -> RedirectResponse:
        return RedirectResponse("/view/")

    routes = [Mount("/view/", viewer), Route("/view", to_page), Route("/", to_page)]
    return TrustedHostMiddleware(OwnPages(Starlette(routes=routes)), allowed_hosts=hosts(host))


def listen(host: str, port: int) -> socket.socket:
    """The socket.

    Raises:
        ConfigError: taken, or not an address of this machine.
    """
    listener = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(f"cannot listen at {host}:{port} ({error.strerror}); name another with --port") from error


def _url(host: str, port: int) -> str:
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{near}]' if ':' in near else near}:{port}/view/"

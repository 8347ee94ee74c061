"""The viewer as an ASGI application: the built page, and the read-only API under `data/`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from relax_sdk.errors import RelaxError
from relax_server.gateway.errors import ApiError, as_api_error
from relax_server.gateway.wire import error_response
from relax_server.json_form import as_json
from relax_server.viewer.base import Door, Source
from relax_server.viewer.built import STATIC, BuiltPage
from relax_server.viewer.live import follow
from relax_server.viewer.packing import pack
from relax_server.viewer.pages import File, Pages, known_run

MOST_STREAMS = 256
"""Pages that may follow a run at once."""
THREADS = 4
"""Answers that are made at once; more wait."""
SECONDS = 60.0
"""Seconds in which an answer must be made."""
MEDIA_HEADERS = {
    "Cache-Control": "private, max-age=31536000, immutable",
    "Content-Security-Policy": "default-src 'none'; sandbox",
}
T = TypeVar("T")
logger = logging.getLogger(__name__)


class ViewerApp:
    """Answers `GET` and `HEAD` below the path that it is mounted at. Belongs to one event loop.

    Args:
        door: lets callers in.
        pages: the answers.
        static: folder of the built page.
        tells_all: whether errors may name files and databases of this machine.
    """

    def __init__(self, door: Door, pages: Pages, static: Path = STATIC, tells_all: bool = False) -> None:
        self._door, self._pages, self._built, self._tells_all = door, pages, BuiltPage(static), tells_all
        self._threads = ThreadPoolExecutor(THREADS, "viewer")
        self._streams = 0
        """Pages that follow a run now."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        request = Request(scope, receive, send)
        try:
            response = await self._answer(request)
        except RelaxError as error:
            response = error_response(self._told(error))
        except Exception as error:
            logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
            response = error_response(
                ApiError(500, f"the viewer failed: {type(error).__name__}; see its log", "internal_error")
            )
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            raise ApiError(405, "the viewer only shows: GET and HEAD", "http_error", headers={"Allow": "GET, HEAD"})
        path = segments(request.scope)
        if path[:1] != ["data"]:
            return self._built.answer(path, _takes_gzip(request))
        if path == ["data", "site.json"]:
            keys = await self._door.wants_key()
            return _sent(as_json(self._pages.site(keys)), False)
        source = await self._door.enter(request)
        if path[1:2] == ["runs"] and path[3:] == ["live"]:
            return await self._live(request, source, path[2])
        return await self._json(request, lambda: self._pages.answer(source, path[1:], request.query_params))

    async def _json(self, request: Request, make: Callable[[], dict[str, Any] | File]) -> Response:
        zipped = _takes_gzip(request)

        def made() -> Response:
            answer = make()
            if isinstance(answer, File):
                return FileResponse(answer.path, media_type=answer.mime, headers=MEDIA_HEADERS)
            return _sent(as_json(answer), zipped)

        return await self._call(made)

    async def _live(self, request: Request, source: Source, name: str) -> Response:
        """A stream of what changes in a run."""
        if self._streams >= MOST_STREAMS:
            message = f"{MOST_STREAMS} pages follow runs already; close some"
            raise ApiError(503, message, "too_many_streams", headers={"Retry-After": "5"})
        run = await self._call(lambda: known_run(source, name))
        return follow(lambda: self._call(lambda: self._pages.changes.of(run)), lambda: self._door.enter(request), self._count)

    def _count(self, more: int) -> None:
        self._streams += more

    async def _call(self, make: Callable[[], T]) -> T:
        """Call what waits for disk or database, in a thread.

        Raises:
            ApiError: 504, it did not come back in time.
        """
        waiting = asyncio.get_running_loop().run_in_executor(self._threads, make)
        try:
            return await asyncio.wait_for(waiting, SECONDS)
        except TimeoutError as error:
            raise ApiError(504, f"the answer was not ready within {SECONDS:g} s; try again", "timeout") from error

    def _told(self, error: RelaxError) -> ApiError:
        """An error as callers are told it; a user who looks at files of their own is told all of it."""
        told = as_api_error(error)
        return ApiError(told.status, str(error), told.code, headers=told.headers) if self._tells_all else told

    def close(self) -> None:
        """Let the threads go, and remove what was made on request."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pages.close()


def segments(scope: Scope) -> list[str]:
    """The decoded segments of a request's path below where the application is mounted; a run's name may hold a slash."""
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    below = raw.decode("latin-1").partition("/view/")[2]
    return [unquote(segment) for segment in below.split("/")]


def _takes_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")


def _sent(answer: bytes, zipped: bool) -> Response:
    """An answer in JSON, which is asked for anew each time."""
    body, headers = pack(answer, zipped)
    return Response(body, headers=headers | {"Cache-Control": "no-store"}, media_type="application/json")

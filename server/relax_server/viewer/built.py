"""The built page, kept in memory: a few small files, which are asked for before anything can be drawn."""

from __future__ import annotations

import mimetypes
from collections.abc import Sequence
from pathlib import Path

from starlette.responses import Response

from relax_server.gateway.errors import ApiError, unknown
from relax_server.viewer.packing import pack

STATIC = Path(__file__).parent / "static"
"""Folder of the built page."""
INDEX = ("index.html",)
KEPT = {"Cache-Control": "public, max-age=31536000, immutable"}
"""Headers of files whose names say what is in them."""
ASKED_AGAIN = {"Cache-Control": "no-cache"}


class BuiltPage:
    """The files of the page, each looked up by its name, as nothing of a URL becomes part of a path.

    Args:
        folder: of the build; it is read once.
    """

    def __init__(self, folder: Path = STATIC) -> None:
        self._files = {file.relative_to(folder).parts: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        self._packed: dict[tuple[tuple[str, ...], bool], tuple[bytes, dict[str, str]]] = {}

    def answer(self, path: Sequence[str], zipped: bool) -> Response:
        """The file at `path`, `[""]` the page itself, compressed where it is worth it and the browser takes it.

        Raises:
            ApiError: 404, there is none, or the page was not built.
        """
        name = tuple(path) if list(path) != [""] else INDEX
        if name == INDEX and INDEX not in self._files:
            raise ApiError(404, "the page of the viewer was not built: run `make view`", "no_page")
        if name not in self._files:
            raise unknown("page", "/".join(path)[:200])
        if (name, zipped) not in self._packed:
            self._packed[name, zipped] = pack(self._files[name], zipped, level=9)
        body, headers = self._packed[name, zipped]
        kind = mimetypes.guess_type(name[-1])[0] or "application/octet-stream"
        return Response(body, headers=headers | (KEPT if name[0] == "assets" else ASKED_AGAIN), media_type=kind)

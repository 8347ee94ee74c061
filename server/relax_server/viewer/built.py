"""The built page, kept in memory: a few small files, which are asked for before anything can be drawn."""

from __future__ import annotations

import mimetypes
from collections.abc import Sequence
from dataclasses import dataclass
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
        self._files = {file.relative_to(folder).parts: _File.read(file) for file in folder.rglob("*") if file.is_file()}

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
        file = self._files[name]
        body, headers = file.zipped if zipped else file.plain
        return Response(body, headers=headers | (KEPT if name[0] == "assets" else ASKED_AGAIN), media_type=file.mime)


@dataclass(frozen=True)
class _File:
    """A file as it is sent: bodies with their headers, made before anybody asks."""

    mime: str
    plain: tuple[bytes, dict[str, str]]
    zipped: tuple[bytes, dict[str, str]]

    @staticmethod
    def read(path: Path) -> _File:
        body, mime = path.read_bytes(), mimetypes.guess_type(path.name)[0]
        return _File(mime or "application/octet-stream", pack(body, False), pack(body, True, level=9))

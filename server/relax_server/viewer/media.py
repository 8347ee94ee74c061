"""Media of a run: which there are, where their bytes are, and what is told of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from relax_sdk.errors import MediaError
from relax_sdk.media import MediaRef, MediaStore
from relax_sdk.media_formats import EXTENSIONS, Kind
from relax_sdk.media_places import media_names
from relax_sdk.trajectory import Trajectory
from relax_server.journal.sql import SqlJournal
from relax_server.viewer.base import ViewedRun

FACTS = ("kind", "mime", "size", "width", "height", "duration", "sampling_rate", "fps")
MIMES = {extension: mime for mime, extension in EXTENSIONS.items()}
DIGITS = frozenset("0123456789abcdef")


def shown_media(run: ViewedRun, episode: Trajectory) -> dict[str, Any]:
    """All media of an episode by sha256: those that its prompts held, and those that only its messages name."""
    refs = {ref.sha256: ref for turn in episode.turns for ref in turn.media}
    told = {sha256: described(run, ref) for sha256, ref in refs.items()}
    for kind, sha256 in sorted(media_names(episode.messages), key=str):
        if sha256 in told:
            continue
        ref = found_media(run, sha256, kind)
        missing = {name: None for name in FACTS} | {"kind": kind, "url": None, "missing": True}
        told[sha256] = described(run, ref) if ref is not None else missing
    return told


def media_page(run: ViewedRun, journal: SqlJournal | None, after: int, limit: int) -> dict[str, Any]:
    """The different media of a run, in the order in which they were first shown."""
    rows = journal.media(run.run, after, limit) if journal is not None else []
    items = [{"seq": r.seq, "sha256": r.ref.sha256, "trajectory_seq": r.trajectory_seq} | described(run, r.ref) for r in rows]
    return {"media": items, "next": rows[-1].seq if rows else after, "more": len(rows) == limit}


def described(run: ViewedRun, ref: MediaRef) -> dict[str, Any]:
    """What is told of an item."""
    facts = {name: getattr(ref, name) for name in FACTS}
    return facts | {"url": f"{run_url(run.name)}/media/{ref.sha256}{ref.extension}", "missing": not path_of(run, ref).is_file()}


def run_url(name: str) -> str:
    """Where the data of a run are, relative to the page."""
    return f"data/runs/{quote(name, safe='')}"


def media_file(run: ViewedRun, name: str) -> tuple[Path, str] | None:
    """The file of a `<sha256>.<extension>`, and its MIME type; None: there is none, or the name is no such name."""
    sha256, dot, extension = name.partition(".")
    mime = MIMES.get(dot + extension)
    if mime is None or not is_sha256(sha256):
        return None
    path = path_of(run, MediaRef(sha256, mime, 0))
    return (path, mime) if path.is_file() else None


def path_of(run: ViewedRun, ref: MediaRef) -> Path:
    """Where a store keeps an item; unlike `MediaStore` this makes no folder.

    Raises:
        MediaError: the reference carries no sha256.
    """
    if not is_sha256(ref.sha256):
        raise MediaError(f"not a sha256: {ref.sha256!r}")
    return run.media / ref.sha256[:2] / (ref.sha256 + ref.extension)


def found_media(run: ViewedRun, sha256: str, kind: Kind | None = None) -> MediaRef | None:
    """The reference of an item; None: its name is no sha256, it is not there, or cannot be read."""
    if not is_sha256(sha256) or not run.media.is_dir():
        return None
    try:
        return MediaStore(run.media).find(sha256, kind)
    except MediaError:
        return None


def is_sha256(text: str) -> bool:
    """Whether a text can be the sha256 of an item."""
    return len(text) == 64 and DIGITS.issuperset(text)

"""What is looked at: runs, wherever they are kept, and the parts of one that the viewer reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from starlette.requests import HTTPConnection

from relax_server.journal.sql import SqlJournal


@dataclass(frozen=True)
class ViewedRun:
    """One run, as the viewer reads it; any part but its name may be missing."""

    name: str
    """Names it in URLs; unique within its source. It is looked up, and never becomes part of a path."""
    folder: Path | None
    """The run folder: settings, metrics, events, timeline and logs; None: the run is rows of a journal alone."""
    run: str
    """Its name in the journal."""
    open_journal: Callable[[], SqlJournal | None]
    """Gives the journal, which stays the source's: not to be closed. None: the run has none (yet).

    Raises:
        JournalError: it cannot be read.
    """
    media: Path
    """The folder of its `MediaStore`."""
    models: tuple[Path, ...] = ()
    """Model folders that may hold the tokenizer of its tokens, the best one first."""
    shows_paths: bool = True
    """Whether who looks may see where things lie on this machine."""
    replay: str | None = None
    """What `relax replay` is given to find it; None: its episodes cannot be played again from here."""
    named: Callable[[], Path | None] | None = None
    """Gives the folder of the model that the settings name, None where it is not on this machine; a built-in model is made
    first, which takes seconds."""

    def model_folders(self) -> Iterator[Path]:
        """Folders to look for a tokenizer and a processor in, the best one first; the named model is found only when asked."""
        yield from self.models
        named = self.named() if self.named is not None else None
        if named is not None:
            yield named


class Door(Protocol):
    """Lets callers in. Belongs to one event loop."""

    async def enter(self, request: HTTPConnection) -> Source:
        """What the caller of a request may see.

        Raises:
            RelaxError: it may see nothing; how it is answered is in `gateway.errors`.
        """
        ...

    async def wants_key(self) -> bool:
        """Whether callers must show a key."""
        ...


class Source(Protocol):
    """Runs that a caller may look at. Methods wait for disk and database, and are called in threads."""

    def runs(self) -> Sequence[ViewedRun]:
        """All runs, in any order.

        Raises:
            RelaxError: they cannot be listed.
        """
        ...

    def run(self, name: str) -> ViewedRun | None:
        """The run of a name; None: there is none, or it is not this caller's."""
        ...

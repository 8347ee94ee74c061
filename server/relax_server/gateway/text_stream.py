"""A response as text while it grows: only what later tokens cannot change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_server.models.processor import Processor

TOOL_CALL = "<tool_call>"
BROKEN = "\ufffd"
"""What half a character decodes to."""


class TextStream:
    """Turns growing token ids into pieces of text, each told once.

    Held back are half characters, what may be the beginning of a stop text or of a tool call, and all from a tool call on.

    Args:
        processor: of the model.
        stop: texts that end the response and are not part of what is told.
    """

    def __init__(self, processor: Processor, stop: Sequence[str] = ()) -> None:
        self._processor = processor
        self._stop = tuple(stop)
        self._ends = (*self._stop, TOOL_CALL)
        self._before = self._read = 0  # decoding goes over ids[before:], of which ids[before:read] is decoded already
        self._tokens = 0
        self._pending = ""
        self._told = 0
        self._over = False

    def feed(self, ids: Sequence[int]) -> str:
        """What is new and settled.

        Args:
            ids: the whole response so far.
        """
        ids = [id for id in ids if id not in self._processor.eos_ids]
        known = self._processor.decode(ids[self._before : self._read])
        text = self._processor.decode(ids[self._before :])
        if len(text) > len(known) and not text.endswith(BROKEN):
            self._pending += text[len(known) :]
            self._before, self._read = self._read, len(ids)
        return self._settled()

    def finish(self, text: str) -> str:
        """The rest, once the whole text is known.

        Args:
            text: all that should have been told in the end.
        """
        rest = text[self._told :]
        self._told = len(text)
        return rest

    def _settled(self) -> str:
        if self._over:
            return ""
        first = min((at for end in self._ends if (at := self._pending.find(end)) >= 0), default=-1)
        if first >= 0:
            self._over, new = True, self._pending[:first]
        else:
            held = max(_overlap(self._pending, end) for end in self._ends)
            new = self._pending[: len(self._pending) - held]
        self._pending = self._pending[len(new) :]
        self._told += len(new)
        return new


def _overlap(text: str, end: str) -> int:
    """Length of the longest end of `text` that `end` begins with, `end` itself excepted."""
    return next((n for n in range(min(len(end) - 1, len(text)), 0, -1) if text.endswith(end[:n])), 0)

"""A response as text while it grows: only what later tokens cannot change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relax_server.models.tool_calls import OPEN

if TYPE_CHECKING:
    from relax_server.models.processor import Processor

BROKEN = "\ufffd"
"""What half a character decodes to."""


class TextStream:
    """Turns growing token ids into pieces of text, each told once.

    Held back are half characters, what may be the beginning of a stop text or of a tool call, and all from a tool call on.
    Control tokens are no text and are left out.

    Args:
        processor: of the model.
        stop: texts that end the response and are not part of what is told.
    """

    def __init__(self, processor: Processor, stop: Sequence[str] = ()) -> None:
        self._processor = processor
        self._stop = tuple(stop)
        self._ends = (*self._stop, OPEN)
        self._before = self._read = 0  # decoding goes over ids[before:], of which ids[before:read] is decoded already
        self._called = False  # a tool call was begun by a control token
        self._pending = ""
        self._told = 0
        self._over = False

    def feed(self, ids: Sequence[int]) -> str:
        """What is new and settled.

        Args:
            ids: the whole response so far.
        """
        control = self._processor.answers.control
        while not self._called:
            end = next((at for at in range(self._read, len(ids)) if ids[at] in control), len(ids))
            known = self._processor.decode(ids[self._before : self._read])
            text = self._processor.decode(ids[self._before : end])
            closed = end < len(ids)  # by a control token: later tokens cannot complete a character any more
            if len(text) > len(known) and (closed or not text.endswith(BROKEN)):
                self._pending += text[len(known) :]
                self._before, self._read = self._read, end
            if not closed:
                break
            self._called = control[ids[end]] == OPEN
            self._before = self._read = end + 1
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

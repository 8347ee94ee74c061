"""Text of strangers on its way to a terminal."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for the tab and the line feed, marks that change the direction of text, and lone surrogates."""


def printable(text: str) -> str:
    """The text with control characters written out, as `\\x1b`: printed raw they could move the cursor, rename the window or
    make a line look like another one."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)

"""Text of strangers as a terminal may show it."""

from __future__ import annotations

import re

_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")
"""Control characters but tabs and line ends; what turns the direction of text, or cannot be seen; halves of characters."""


def visible(text: str) -> str:
    r"""The text with what a terminal would obey, or nobody would see, written out, such as `\x1b` for an escape."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)

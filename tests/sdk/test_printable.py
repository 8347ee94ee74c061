"""What strangers wrote cannot steer the terminal of who reads it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_sdk.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\nlines\tand more", "two\nlines\tand more"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("over\rwritten", "over\\rwritten"),
        ("\x9b31m", "\\x9b31m"),
        ("abc\u202edef", "abc\\u202edef"),
        ("\ud800", "\\ud800"),
        ("Grüße, 音声 🎧", "Grüße, 音声 🎧"),
    ],
)
def test_control_characters_are_written_out(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_nothing_steers_a_terminal(text: str) -> None:
    shown = printable(text)
    assert all(c in "\n\t" or c >= " " for c in shown) and printable(shown) == shown
    shown.encode()  # no lone surrogate is left

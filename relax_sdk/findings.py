"""`Finding`: one thing that `relax doctor` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing the doctor saw."""

    level: Literal["ok", "note", "problem"]
    what: str
    advice: str = ""

    @property
    def sentence(self) -> str:
        """The finding in one line: what was seen, and what to do about it as a sentence of its own."""
        if not self.advice:
            return f"{self.what}."
        first, _, rest = self.advice.partition(" ")
        return f"{self.what}. {first.capitalize() if first.isalpha() else first} {rest}"  # a setting's name stays as it is

    def __str__(self) -> str:
        mark = {"ok": "  ", "note": "- ", "problem": "! "}[self.level]
        return mark + self.what + (f"\n    {self.advice}" if self.advice else "")

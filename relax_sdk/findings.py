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

    def __str__(self) -> str:
        mark = {"ok": "  ", "note": "- ", "problem": "! "}[self.level]
        return mark + self.what + (f"\n    {self.advice}" if self.advice else "")

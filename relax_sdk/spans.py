"""The spans that the processes of a run leave in its folder, one JSON object a line (Chrome trace events)."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

Spans = dict[str, list[dict[str, Any]]]
"""Spans by process (`<role>-<pid>`), each list in the order of their beginnings."""


def read_spans(folder: Path) -> Spans:
    """All spans of a run; lines that a killed process, or a full disk, left unfinished are passed over."""
    spans: Spans = {}
    for file in sorted(folder.glob("*.jsonl")):
        events: list[dict[str, Any]] = []
        for line in file.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                events.append(json.loads(line))
        spans[file.stem] = sorted(events, key=lambda event: event["ts"])
    return spans

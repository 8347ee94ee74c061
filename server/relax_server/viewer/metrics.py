"""Metrics and events of a run, as they lie in its folder, in the form that the page draws them from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relax_sdk.run import METRICS
from relax_server.viewer.json_lines import Lines, read_lines

EVENTS = "events.jsonl"


def metrics_page(folder: Path | None, after: str | None) -> dict[str, Any]:
    """Metrics behind a cursor by column, nested names joined with `/`; a column is null where a row has no such number.

    Args:
        folder: of the run; None: it has none, and no metrics.
        after: the cursor; None: from the beginning.
    """
    found = read_lines(folder / METRICS, after) if folder is not None else Lines([], "", False)
    rows = [dict(flat(row)) for row in found.rows if isinstance(row.get("step"), int)]
    names = dict.fromkeys(["step", "time", *(name for row in rows for name in row)])
    columns = {name: [row.get(name) for row in rows] for name in names}
    return {"columns": columns, "next": found.next, "reset": found.reset}


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Numbers of nested dictionaries as (`outer/inner`, value); truth values as 0 and 1."""
    out: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            out += flat(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            out.append((prefix + name, int(value) if isinstance(value, bool) else value))
    return out


def events_page(folder: Path | None, after: str | None) -> dict[str, Any]:
    """Events behind a cursor, oldest first."""
    found = read_lines(folder / EVENTS, after) if folder is not None else Lines([], "", False)
    return {"events": [_event(row) for row in found.rows], "next": found.next, "reset": found.reset}


def _event(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row.get(name) for name in ("n", "time", "step", "kind", "level", "what", "advice", "role")}

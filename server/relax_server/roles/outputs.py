"""What a run writes of its steps: metrics as JSON lines."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from relax_server.roles.layout import RunLayout


class Outputs:
    """Appends to a run folder; a line is whole or absent, also after a crash."""

    def __init__(self, layout: RunLayout) -> None:
        self._file = layout.metrics.open("a", buffering=1)

    def write(self, metrics: dict[str, Any]) -> None:
        """One step's metrics; writing a step again replaces it for readers.

        Raises:
            OSError: they cannot be written, as on a full disk.
        """
        self._file.write(_line(metrics))

    def close(self) -> None:
        """Close the file. What could not be written has been told of by `write`."""
        with contextlib.suppress(OSError):
            self._file.close()


def drop_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Forget metrics of steps after `step`: the run goes on from there.

    Returns:
        The rows that stay, as they were written.

    Raises:
        OSError: the file cannot be written; it is as it was.
    """
    if not path.exists():
        return []
    text = path.read_text()
    lines = text.splitlines()
    kept = [row for line in lines if line.endswith("}") and (row := json.loads(line))["step"] <= step]
    if len(kept) < len(lines) or not text.endswith("\n"):  # a line may lack its end alone
        fresh = path.with_name(f".{path.name}")
        fresh.write_text("".join(_line(row) for row in kept))
        fresh.replace(path)
    return kept


def plain(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics as a reader of their line has them."""
    return json.loads(_line(metrics))


def _line(metrics: dict[str, Any]) -> str:
    return json.dumps(metrics, default=float) + "\n"

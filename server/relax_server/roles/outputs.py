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
        self._file.write(json.dumps(metrics, default=float) + "\n")

    def close(self) -> None:
        """Close the file. What could not be written has been told of by `write`."""
        with contextlib.suppress(OSError):
            self._file.close()


def drop_after(path: Path, step: int) -> None:
    """Forget metrics of steps after `step`: the run goes on from there."""
    if not path.exists():
        return
    rows = [line for line in path.read_text().splitlines() if line.endswith("}") and json.loads(line)["step"] <= step]
    path.write_text("".join(row + "\n" for row in rows))

"""What lies where in a run folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from relax_sdk.run import METRICS, WEIGHTS
from relax_server.timeline import TRACE


@dataclass(frozen=True)
class RunLayout:
    """Paths inside a run folder."""

    folder: Path

    @property
    def journal(self) -> Path:
        return self.folder / "journal.db"

    @property
    def media(self) -> Path:
        return self.folder / "media"

    @property
    def metrics(self) -> Path:
        return self.folder / METRICS

    @property
    def timeline(self) -> Path:
        """Spans of every process; `trace` is made of them."""
        return self.folder / "timeline"

    @property
    def trace(self) -> Path:
        return self.folder / TRACE

    @property
    def tensorboard(self) -> Path:
        return self.folder / "tensorboard"

    @property
    def weights(self) -> Path:
        """The trained model, as a Hugging Face folder."""
        return self.folder / WEIGHTS

    @property
    def reference(self) -> Path:
        """The weights after the warm-up, as a Hugging Face folder, where the KL penalty compares with them."""
        return self.folder / "reference"

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step_{step:06d}"

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        root = self.folder / "checkpoints"
        found = [p for p in root.iterdir() if re.fullmatch(r"step_\d+", p.name)] if root.exists() else []
        return sorted(found)

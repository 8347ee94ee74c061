"""What lies where in a run folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from relax_sdk.run import EVENTS, METRICS, STATUS, WEIGHTS
from relax_sdk.showing import MEDIA
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
        return self.folder / MEDIA

    @property
    def metrics(self) -> Path:
        return self.folder / METRICS

    @property
    def events(self) -> Path:
        """What the run has said; `relax_server.roles.events` writes it."""
        return self.folder / EVENTS

    @property
    def status(self) -> Path:
        """How the run stands, or stood at its end; `relax_server.roles.status` writes it."""
        return self.folder / STATUS

    @property
    def timeline(self) -> Path:
        """Spans of every process; `trace` is made of them."""
        return self.folder / "timeline"

    @property
    def trace(self) -> Path:
        return self.folder / TRACE

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

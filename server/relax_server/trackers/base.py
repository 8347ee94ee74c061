"""The interface of trackers: where the figures of a run are shown besides `metrics.jsonl`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from relax_sdk.config import RunConfig
from relax_sdk.errors import ConfigError
from relax_server.trackers.samples import SampleAnswer

End = Literal["done", "stopped", "failed"]
"""How a run ended: with its last step; because it was asked to; by an error."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run when it begins."""

    folder: Path
    config: RunConfig
    resumed: bool = False
    """Whether the run goes on with what is in its folder."""

    @property
    def name(self) -> str:
        return self.folder.name

    def notes(self, tracker: str) -> dict[str, Any]:
        """What a tracker has noted in the run folder before, such as the id of its run; empty in a new run."""
        file = self._file(tracker)
        return json.loads(file.read_text()) if self.resumed and file.exists() else {}

    def note(self, tracker: str, notes: Mapping[str, Any]) -> None:
        """Keep something for when the run goes on, in `trackers/<tracker>.json` of its folder.

        Raises:
            OSError: it cannot be written.
        """
        file = self._file(tracker)
        file.parent.mkdir(exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(dict(notes), indent=1))
        partial.replace(file)

    def _file(self, tracker: str) -> Path:
        return self.folder / "trackers" / f"{tracker}.json"


class Tracker:
    """Shows a run somewhere. Its constructor takes its options, `tracking.options[name]`, as keywords.

    All methods are called from one thread of the tracker's own, in order, `begin` first and `close` last. They may block: calls
    wait in a bounded queue meanwhile. One that raises is told of once as a warning; the run then goes on without the tracker.
    """

    def begin(self, run: TrackedRun) -> None:
        """The run begins, or goes on."""

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures of a step, all finite; those that nest are named `outer/inner`.

        Called once a step, and again for an older step whose held-out evaluation has ended since, then with what is new alone.
        A run that goes on from a checkpoint may repeat steps.
        """

    def samples(self, step: int, samples: Sequence[SampleAnswer]) -> None:
        """The best and the worst answer of a step, or any one where all earned the same; see `SampleAnswer`."""

    def warning(self, step: int, text: str) -> None:
        """Something that the run says to its user, such as a finding or a restart, in one line."""

    def close(self, end: End) -> None:
        """The run has ended; called also when a method before it has raised."""


def flatten(metrics: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Numbers of nested dictionaries as (`outer/inner`, value)."""
    out: list[tuple[str, float]] = []
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            out += flatten(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            out.append((prefix + name, float(value)))
    return out


def need(module: str, extra: str) -> None:
    """Refuse a tracker whose package is not installed.

    Raises:
        ConfigError: names the extra that installs it.
    """
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"tracker {extra!r} needs the package {module}: pip install 'relax-gym[{extra}]'")

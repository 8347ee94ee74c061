"""Recorded episodes written out for other tools: Hugging Face datasets, training data, and Inspect's log."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from relax_sdk.config import RunConfig
from relax_sdk.env import Env
from relax_sdk.errors import ConfigError, RelaxError
from relax_sdk.origin import load_origin
from relax_sdk.progress import Waiting
from relax_sdk.recorded import TrajectoryFilter
from relax_sdk.registry import EnvSpec
from relax_sdk.run import read_config
from relax_sdk.runtime import find_runtime
from relax_sdk.tools import tool_schemas

ExportFormat = Literal["datasets", "sft", "preferences", "tokens", "inspect"]
FORMATS: tuple[ExportFormat, ...] = ("datasets", "sft", "preferences", "tokens", "inspect")


@dataclass(frozen=True)
class ExportRequest:
    """What is to be written where.

    Raises:
        ConfigError: a format that there is not, or a value outside its range.
    """

    to: Path
    format: ExportFormat
    wanted: TrajectoryFilter
    margin: float = 0.0
    """Preferences: by how much more than this the chosen episode's reward is the larger one."""
    pairs: int = 1
    """Preferences: pairs of a group at most, those that are furthest apart."""
    tools: tuple[dict[str, Any], ...] = ()
    """OpenAI schemas of the environment's tools, for formats that name them."""

    def __post_init__(self) -> None:
        for ok, name, allowed in (
            (self.format in FORMATS, "format", ", ".join(FORMATS)),
            (self.margin >= 0, "margin", "0 or more"),
            (self.pairs >= 1, "pairs", "1 or more"),
        ):
            if not ok:
                raise ConfigError(f"export: {name} = {getattr(self, name)!r}; allowed: {allowed}")


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    rows: dict[str, int]
    """Rows by split."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Episodes, pairs or media that were left out, by the reason."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = ", ".join(f"{n} {split}" for split, n in self.rows.items()) or "none"
        lines = [f"{self.folder}: rows: {rows}"]
        lines += [f"left out: {n} ({why})" for why, n in self.skipped.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


class Exporter(Protocol):
    """Writes recorded episodes out; the `local` runtime does."""

    def export(self, folder: Path, config: RunConfig, request: ExportRequest) -> Exported:
        """See `export_trajectories`."""
        ...


def export_trajectories(
    folder: str | Path,
    to: str | Path,
    format: ExportFormat = "datasets",
    *,
    wanted: TrajectoryFilter | None = None,
    margin: float = 0.0,
    pairs: int = 1,
    env: str | type[Env] | EnvSpec | None = None,
    progress: bool = True,
) -> Exported:
    """Write recorded episodes of a run into a folder that other tools read.

    | format | is |
    |---|---|
    | `datasets` | one row an episode with its media, for `datasets.load_dataset(folder)` |
    | `sft` | conversations to imitate |
    | `preferences` | `prompt`, `chosen` and `rejected`, from episodes of one group with different rewards |
    | `tokens` | training sequences: token ids, loss mask, logprobs, weight versions, and the media |
    | `inspect` | a log of Inspect, for `inspect view` |

    Args:
        folder: of the run.
        to: a folder that does not exist yet, or is empty.
        format: one of the above.
        wanted: which episodes; default: all.
        margin: of `preferences`: pairs must be apart by more than this.
        pairs: of `preferences`: at most so many of a group.
        env: the environment, in place of the one that the run's folder names; `sft` and `preferences` ask it for its tools.
        progress: show a live line.

    Raises:
        ConfigError: not a run folder, a folder that holds something, or nothing to write.
    """
    home = Path(folder).resolve()
    config, notes, tools = read_config(home), [], ()
    if format in ("sft", "preferences"):
        try:
            spec, _ = load_origin(home, config.env, env)
            tools = tuple(tool_schemas(spec.make()))
        except RelaxError as error:
            if env is not None:
                raise
            notes.append(f"the schemas of the tools are not in it: {error}")
    chosen = wanted or TrajectoryFilter(sort="oldest", limit=None)
    request = ExportRequest(Path(to).resolve(), format, chosen, margin, pairs, tools)
    with Waiting(f"writing the episodes of {home.name}", progress):
        done = cast(Exporter, find_runtime("local")).export(home, config, request)
    return Exported(done.folder, done.rows, done.skipped, (*done.notes, *notes))

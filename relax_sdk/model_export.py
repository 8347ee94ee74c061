"""A trained model as a folder that other tools read, at any checkpoint that a run has kept."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from relax_sdk.config import RunConfig
from relax_sdk.errors import ConfigError
from relax_sdk.progress import Waiting
from relax_sdk.run import read_config
from relax_sdk.runtime import find_runtime

SHARD_SIZE = 5 * 10**9
"""Bytes of one file of weights, at most."""

UNITS = {"": 1, "B": 1}
UNITS |= {f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("KMGT")}
UNITS |= {f"{prefix}IB": 1024 ** (i + 1) for i, prefix in enumerate("KMGT")}


@dataclass(frozen=True)
class ModelExport:
    """What is to be written where."""

    to: Path
    """A folder that does not exist yet, or is empty."""
    checkpoint: int | None = None
    """Its step; None: the last."""
    shard_size: int = SHARD_SIZE
    """Bytes of one file of weights, at most."""


@dataclass(frozen=True)
class ExportedModel:
    """A model folder that was written."""

    folder: Path
    step: int
    """Training steps that are in its weights."""
    files: tuple[str, ...]
    """Those that hold the weights."""

    def __str__(self) -> str:
        size = sum((self.folder / name).stat().st_size for name in self.files)
        files = self.files[0] if len(self.files) == 1 else f"{len(self.files)} files"
        return f"{self.folder}: the model after {self.step} steps, {size / 1e6:.1f} MB of weights in {files}"


class ModelExporter(Protocol):
    """Writes model folders; the `local` runtime does."""

    def export_model(self, folder: Path, config: RunConfig, request: ModelExport) -> ExportedModel:
        """See `export_model`."""
        ...


def parse_size(text: str | int) -> int:
    """Bytes of a size such as `2GB` (10^9 each), `500 MiB` (2^20 each) or `1000000`.

    Raises:
        ConfigError: not such a text, or less than one byte.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    size = int(float(found[1]) * UNITS[found[2].upper()]) if found and found[2].upper() in UNITS else 0
    if size < 1:
        raise ConfigError(f"shard_size = {text!r}; allowed: a size such as 2GB, 500MiB or 1000000 (bytes)")
    return size


def export_model(
    folder: str | Path,
    to: str | Path,
    *,
    checkpoint: int | None = None,
    shard_size: str | int = SHARD_SIZE,
    progress: bool = True,
) -> ExportedModel:
    """Write the model of a run as a Hugging Face folder, at any checkpoint that the run has kept.

    A process of its own reads the checkpoint, without the optimizer; the run may go on meanwhile.

    Args:
        folder: of the run.
        to: a folder that does not exist yet, or is empty.
        checkpoint: its step; None takes the last.
        shard_size: of one file of weights, at most: bytes, or a text such as `2GB`; a larger tensor has a file of its own.
        progress: show a live line.

    Raises:
        ConfigError: not a run folder, no such checkpoint (the error names those that exist), or `to` holds something.
        CheckpointError: the checkpoint is damaged.
        DiskFull: no room in `to`; nothing was written.
        OutOfMemory: no memory for the model.
    """
    home = Path(folder).resolve()
    request = ModelExport(Path(to).resolve(), checkpoint, parse_size(shard_size))
    config, exporter = read_config(home), cast(ModelExporter, find_runtime("local"))
    with Waiting(f"writing the model of {home.name}", progress):
        return exporter.export_model(home, config, request)

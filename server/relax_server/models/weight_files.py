"""Weights of a Hugging Face folder: which of its files hold them, and what is in these."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from relax_sdk.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights: `model.safetensors`, or else the shards that its index names.

    Other safetensors files in the folder (adapters, shards of an earlier index) are no weights of the model. transformers takes
    the same files.

    Raises:
        ConfigError: neither is there, the index cannot be read, or a shard is missing.
    """
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except FileNotFoundError as error:
        raise ConfigError(f"{folder}: neither {WEIGHTS} nor {INDEX}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / INDEX}: cannot be read ({error!r})") from error
    files = [folder / str(name) for name in names]
    missing = [file.name for file in files if not file.exists()]
    if missing or not files:
        raise ConfigError(f"{folder}: {INDEX} names {', '.join(missing) or 'no file'}, which is missing")
    return files


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors by the names in the files, mapped from disk or shared memory.

    Raises:
        ConfigError: as `weight_files`, or a file is damaged.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        with _opened(file, "pt") as handle:
            tensors |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - not a dict
    return tensors


def read_shapes(folder: Path) -> dict[str, list[int]]:
    """Name and shape of every tensor, from the heads of the files; torch is not needed.

    Raises:
        ConfigError: as `weight_files`, or a file is damaged.
    """
    shapes: dict[str, list[int]] = {}
    for file in weight_files(folder):
        with _opened(file, "numpy") as handle:
            shapes |= {name: handle.get_slice(name).get_shape() for name in handle.keys()}  # noqa: SIM118 - not a dict
    return shapes


@contextmanager
def _opened(file: Path, framework: Literal["pt", "numpy"]) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework=framework) as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from error

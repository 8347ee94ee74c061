"""Weights of a Hugging Face folder: which of its files hold them, what is in these, and tensors read whole or by slices."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

from relax_sdk.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
AGAIN = "download or export the folder again"

MAPPED = 64 << 20
"""Bytes read through the maps of open files before these are closed, so that the pages leave this process's memory."""


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights: `model.safetensors`, or else the shards that its index names.

    Other safetensors files in the folder (adapters, shards of an earlier index) are no weights of the model. transformers takes
    the same files.

    Raises:
        ConfigError: neither is there, the index cannot be read or names a file outside of the folder, or a shard is missing.
    """
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = _index(folder)
    files = [folder / name for name in sorted(set(index.values()))]
    missing = [file.name for file in files if not file.exists()]
    if missing or not files:
        named = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise ConfigError(f"{folder}: {INDEX} names {named or 'no file'}, which is missing; {AGAIN}")
    return files


def _index(folder: Path) -> dict[str, str]:
    """File of each tensor, by the folder's index.

    Raises:
        ConfigError: there is none, it cannot be read, or it names a file outside of the folder.
    """
    try:
        index = {str(name): str(file) for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items()}
    except FileNotFoundError as error:
        raise ConfigError(f"{folder}: neither {WEIGHTS} nor {INDEX}; name a folder of a model in safetensors format") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / INDEX}: cannot be read ({error!r}); {AGAIN}") from error
    for name, file in index.items():
        if PurePath(file).is_absolute() or ".." in PurePath(file).parts:
            raise ConfigError(f"{folder / INDEX}: {name} is in {file!r}, outside of the folder, which is not read; {AGAIN}")
    return index


class FolderWeights:
    """The weights of a model folder, each read when it is asked for: whole, or a slice of it.

    Only the heads of the files are read at first. What is read is mapped from the disk or from shared memory, and stays in this
    process's memory as long as its tensor is kept.

    Args:
        folder: a Hugging Face folder.
        mapped: bytes read before the files are opened anew, so that a process which keeps no tensor holds no more than that
            many, and one tensor; None: they stay open.

    Raises:
        ConfigError: as `weight_files`; a file is damaged; or the index names a tensor that is not where it says.
    """

    def __init__(self, folder: Path, mapped: int | None = MAPPED) -> None:
        self.folder = folder
        self.files: dict[str, Path] = {}
        """File of each tensor."""
        self.shapes: dict[str, list[int]] = {}
        self.dtypes: dict[str, str] = {}
        """By the names of the safetensors format: `F32`, `BF16`."""
        self._mapped, self._read = mapped, 0
        self._open: dict[Path, Any] = {}
        files = weight_files(folder)
        index = {} if files == [folder / WEIGHTS] else {name: folder / file for name, file in _index(folder).items()}
        for file in files:
            with _damage_told(file):
                self._take_head(file, index)
        lacking = next((name for name in index if name not in self.files), None)
        if lacking is not None:
            raise ConfigError(f"{folder}: {INDEX} says that {index[lacking].name} holds {lacking}, and it does not; {AGAIN}")

    def _take_head(self, file: Path, index: dict[str, Path]) -> None:
        head = _safe_open(file, "numpy")
        for name in head.keys():  # noqa: SIM118 - not a dict
            if index.get(name, file) == file:
                part = head.get_slice(name)
                self.files[name], self.shapes[name], self.dtypes[name] = file, part.get_shape(), part.get_dtype()

    def where(self, name: str) -> str:
        """Say which tensor of which file, for messages."""
        return f"{self.files[name]}: tensor {name}"

    def read(self, name: str, at: Sequence[slice] = ()) -> Tensor:
        """One tensor, or a part of it.

        Args:
            name: of the tensor.
            at: a slice with start and stop for each of the first dimensions; the others are read whole.

        Returns:
            A view of the file, with the dtype that it has there. It is not to be written to.

        Raises:
            ConfigError: no such tensor, a slice that is not inside it, or the file cannot be read any more.
        """
        if name not in self.files:
            raise ConfigError(f"{self.folder}: no file holds the tensor {name}; {AGAIN}")
        shape = self.shapes[name]
        if len(at) > len(shape) or any(not 0 <= s.start <= s.stop <= n for s, n in zip(at, shape, strict=False)):
            wanted = ", ".join(f"{s.start}:{s.stop}" for s in at)
            raise ConfigError(f"{self.where(name)} has shape {shape}, and [{wanted}] was asked of it; is this the right model?")
        with _damage_told(self.files[name]):
            if self._mapped is not None and self._read > self._mapped:
                self._open.clear()
                self._read = 0
            opened = self._open.get(self.files[name])
            if opened is None:
                opened = self._open[self.files[name]] = _safe_open(self.files[name], "pt")
            found = opened.get_slice(name)[tuple(at)] if at else opened.get_tensor(name)
        self._read += found.nbytes
        return found


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors by the names in the files, mapped from disk or shared memory.

    Raises:
        ConfigError: as `FolderWeights`.
    """
    weights = FolderWeights(folder, mapped=None)
    return {name: weights.read(name) for name in weights.files}


def read_shapes(folder: Path) -> dict[str, list[int]]:
    """Name and shape of every tensor, from the heads of the files; torch is not needed.

    Raises:
        ConfigError: as `FolderWeights`.
    """
    return FolderWeights(folder).shapes


def _safe_open(file: Path, framework: Literal["pt", "numpy"]) -> Any:
    from safetensors import safe_open

    return safe_open(file, framework=framework)


@contextmanager
def _damage_told(file: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: is missing; {AGAIN}") from error
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); it is damaged or cut short: {AGAIN}") from error

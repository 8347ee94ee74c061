"""Media features that the processes of a run share: whoever prepares an item first, the others read it from shared memory.

Preparing a short video costs some ten milliseconds; without this the environment process, the engine and the trainer would each
do it for every item.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from relax_server.models.media_item import Kind, MediaFeatures

MAX_BYTES = 512 * 2**20
"""Most that one writer keeps; its oldest items go first."""


class SharedFeatures:
    """A folder with one file per item; used by several processes at once, none of which depends on it.

    Args:
        folder: in shared memory, readable by this run's processes only; made, and removed, by whoever starts them.
        settings: names the settings that media are prepared with, `ProcessorConfig.digest`.
        max_bytes: bytes that this writer may leave there.
    """

    def __init__(self, folder: Path, settings: str, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder
        self._settings = settings
        self._max_bytes = max_bytes
        self._mine: OrderedDict[Path, int] = OrderedDict()
        self._bytes = 0

    def _file(self, sha256: str, kind: Kind) -> Path:
        return self.folder / f"{kind}-{sha256}-{self._settings}"

    def get(self, sha256: str, kind: Kind) -> MediaFeatures | None:
        """The features that some process has put there; None where there are none, or none any more."""
        try:
            with safe_open(self._file(sha256, kind), framework="numpy") as file:
                note = file.metadata() or {}
                tensor = file.get_tensor("tensor")
                heard = file.get_tensor("sound") if "sound" in note else None
        except (OSError, SafetensorError):
            return None
        grid = None
        if "grid" in note:
            time, height, width = map(int, note["grid"].split())
            grid = time, height, width
        second = float(note["second_per_grid"]) if "second_per_grid" in note else None
        times = tuple(map(float, note["times"].split())) if "times" in note else None
        sound = None if heard is None else MediaFeatures("audio", heard, int(note["sound"]))
        return MediaFeatures(kind, tensor, int(note["n_tokens"]), grid, second, times, sound)

    def put(self, sha256: str, features: MediaFeatures) -> None:
        """Share an item; where there is no room it is not shared."""
        file = self._file(sha256, features.kind)
        note = {"n_tokens": str(features.n_tokens)}
        if features.grid is not None:
            note["grid"] = " ".join(map(str, features.grid))
        if features.second_per_grid is not None:
            note["second_per_grid"] = repr(features.second_per_grid)
        tensors = {"tensor": features.tensor}
        if features.sound is not None:
            tensors["sound"] = features.sound.tensor
            note["sound"] = str(features.sound.n_tokens)
        if features.times is not None:
            note["times"] = " ".join(map(repr, features.times))
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, partial, note)
            partial.replace(file)
        except (OSError, SafetensorError):
            with contextlib.suppress(OSError):
                partial.unlink()
            return
        if file not in self._mine:
            self._mine[file] = sum(tensor.nbytes for tensor in tensors.values())
            self._bytes += self._mine[file]
        while self._bytes > self._max_bytes and len(self._mine) > 1:
            old, size = self._mine.popitem(last=False)
            self._bytes -= size
            with contextlib.suppress(OSError):
                old.unlink()

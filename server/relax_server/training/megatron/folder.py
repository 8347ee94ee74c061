"""Writing a Hugging Face folder, so that a reader never sees half a file, nor a folder that looks whole and is not."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from relax_sdk.model_export import SHARD_SIZE
from relax_server.machine_limits import check_room, limits_told
from relax_server.models.families import TABLE
from relax_server.models.weight_files import INDEX, WEIGHTS
from relax_server.training.megatron import parallel
from relax_server.training.megatron.hf_weights import HfWeights, WithUntrained
from relax_server.training.megatron.link import Slices

_KEPT = {file for family in TABLE.values() if family.whole is not None for file in family.whole.files}
_NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What the safetensors format calls dtypes."""


Weights = HfWeights | WithUntrained | Mapping[str, Tensor]


def write_weights(weights: Weights, folder: Path) -> None:
    """Write `model.safetensors` under another name and rename it; one tensor at a time is in memory.

    Every rank calls it, and writes its part.

    Args:
        weights: by the names that they have in the file.
        folder: made where it is missing.

    Raises:
        DiskFull: no room for it; nothing is written.
    """
    whole = _whole(weights)
    file = TensorFile(folder / WEIGHTS, whole)
    what = f"{WEIGHTS} cannot be written"
    with _together(what, folder):
        if parallel.leads():
            folder.mkdir(parents=True, exist_ok=True)
            check_room(folder, file.size, WEIGHTS)
    try:
        _write([file], weights, what, durable=False)
        with _together(what, folder):
            if parallel.leads():
                os.replace(file.partial, file.path)
    finally:
        if parallel.leads():
            file.partial.unlink(missing_ok=True)


def write_folder(
    source: Path,
    weights: Weights,
    folder: Path,
    shard_size: int = SHARD_SIZE,
    also: Callable[[Path], None] | None = None,
) -> list[str]:
    """Write a whole model folder, in place of the one that is there: all is on the disk before it has its name.

    Every rank calls it, and writes its part; the folder is one that all of them see.

    Args:
        source: a model folder; all of it but its weights is copied: configuration, tokenizer, chat template, preprocessor.
        weights: by the names that they have in the folder; one tensor at a time is in memory.
        folder: to be written.
        shard_size: bytes of the tensors in one file, at most; a larger tensor has a file of its own. Where all fit into one
            file, that is `model.safetensors`, and otherwise there is an index.
        also: writes more into the folder on one rank, before the folder has its name; small things.

    Returns:
        Names of the files that hold the weights.

    Raises:
        DiskFull: no room for it; nothing is written.
    """
    whole = _whole(weights)
    shards = plan_shards(whole, shard_size)
    partial = folder.with_name(f".{folder.name}.partial")
    files = [TensorFile(partial / name, {key: whole[key] for key in keys}) for name, keys in shards.items()]
    what = "the model folder cannot be written"
    try:
        with _together(what, folder):
            if parallel.leads():
                _begin_folder(source, partial, folder, sum(t.nbytes for t in whole.values()))
        _write(files, weights, what, durable=True)
        with _together(what, folder):
            if parallel.leads():
                if also is not None:
                    also(partial)
                _end_folder(files, partial, folder)
    finally:
        if parallel.leads():
            shutil.rmtree(partial, ignore_errors=True)
    return [*shards]


def _begin_folder(source: Path, partial: Path, folder: Path, size: int) -> None:
    """Make a folder with all but the weights, which take `size` bytes.

    Raises:
        DiskFull: no room for it.
    """
    files = [f for f in source.iterdir() if f.is_file() and not f.name.startswith(".")]
    rest = [f for f in files if f.name in _KEPT or not f.name.endswith(_NOT_COPIED)]
    check_room(folder.parent, size + sum(file.stat().st_size for file in rest), f"the model folder {folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in rest:
        shutil.copyfile(file, partial / file.name)


def _end_folder(files: list[TensorFile], partial: Path, folder: Path) -> None:
    """Give the files and the folder their names."""
    for file in files:
        os.replace(file.partial, file.path)
    if len(files) > 1:
        names = {key: file.path.name for file in files for key in file.whole}
        size = sum(t.nbytes for file in files for t in file.whole.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(names.items()))}
        with (partial / INDEX).open("wb") as stream:
            stream.write(json.dumps(index, indent=1).encode())
            stream.flush()
            os.fsync(stream.fileno())
    _sync(partial)
    replace_folder(partial, folder)


def plan_shards(whole: Mapping[str, Tensor], shard_size: int) -> dict[str, list[str]]:
    """Names of the tensors of each file, in the order that they are given in."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in whole.items():
        if shards[-1] and size + tensor.nbytes > shard_size:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{number:05}-of-{len(shards):05}.safetensors": names for number, names in enumerate(shards, 1)}


class TensorFile:
    """One file in the safetensors format, into which several processes write their parts at the same time.

    Args:
        path: its name in the end; until it is renamed it is `partial`.
        whole: its tensors: shapes and dtypes; they may be on the meta device.
    """

    def __init__(self, path: Path, whole: Mapping[str, Tensor]) -> None:
        self.path, self.whole = path, whole
        self.partial = path.with_name(f".{path.name}.partial")
        head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in sorted(whole, key=lambda n: -whole[n].element_size()):  # each begins at a multiple of its element's size
            begin, end = end, end + whole[name].nbytes
            head[name] = {"dtype": NAMES[whole[name].dtype], "shape": list(whole[name].shape), "data_offsets": [begin, end]}
        text = json.dumps(head, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self._begin = {name: len(self._head) + head[name]["data_offsets"][0] for name in whole}
        self.size = len(self._head) + end

    def begin(self) -> None:
        """Make the file with its head, and room for all tensors: a full disk is told before any of them is written."""
        with self.partial.open("wb") as file:
            if parallel.layout().ranks > 1 and self.size:
                os.posix_fallocate(file.fileno(), 0, self.size)
            file.write(self._head)

    def write(self, file: BinaryIO, name: str, at: Slices, piece: Tensor) -> None:
        """Write a part of a tensor, one stretch of bytes after the other.

        Args:
            file: this one, open.
            name: of the tensor.
            at: a slice for each of its first dimensions; the others are whole.
            piece: the numbers.
        """
        shape = self.whole[name].shape
        data = piece.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
        cut = max((dim for dim, own in enumerate(at) if own != slice(0, shape[dim])), default=-1)
        inner = piece.element_size() * math.prod(shape[cut + 1 :])  # bytes of one index of the last dimension that is cut
        length = len(data) if cut <= 0 else inner * (at[cut].stop - at[cut].start)
        strides = [piece.element_size() * math.prod(shape[dim + 1 :]) for dim in range(cut + 1)]
        first = sum(own.start * stride for own, stride in zip(at, strides, strict=False))
        for number, index in enumerate(itertools.product(*(range(own.stop - own.start) for own in at[: max(cut, 0)]))):
            offset = first + sum(i * stride for i, stride in zip(index, strides, strict=False))
            file.seek(self._begin[name] + offset)
            file.write(data[number * length : (number + 1) * length])


def _write(files: list[TensorFile], weights: Weights, what: str, durable: bool) -> None:
    """Write the tensors of some files: this rank its part."""
    of = {name: file for file in files for name in file.whole}
    folder = files[0].path.parent
    with _together(what, folder):
        if parallel.leads():
            for file in files:
                file.begin()
    pieces = weights.pieces() if isinstance(weights, (HfWeights, WithUntrained)) else ((name, (), weights[name]) for name in of)
    with _together(what, folder), contextlib.ExitStack() as opened:
        streams: dict[Path, BinaryIO] = {}
        for name, at, piece in pieces:
            file = of[name]
            if file.partial not in streams:
                streams[file.partial] = opened.enter_context(file.partial.open("r+b"))
            file.write(streams[file.partial], name, at, piece)
        if durable:
            for stream in streams.values():
                stream.flush()
                os.fsync(stream.fileno())


@contextlib.contextmanager
def _together(what: str, folder: Path) -> Iterator[None]:
    """A step of writing that all ranks do before any goes on.

    Raises:
        TrainingError: what a machine has run out of on one of them, and what could not be done.
    """
    with parallel.together(), limits_told(what, folder, writes=True):
        yield


def replace_folder(new: Path, folder: Path) -> None:
    """Give a folder that is written its name; one of that name goes away."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def _whole(weights: Weights) -> Mapping[str, Tensor]:
    """Shapes and dtypes of all tensors, without making those that are made on request."""
    return weights.whole if isinstance(weights, (HfWeights, WithUntrained)) else weights


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

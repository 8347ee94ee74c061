"""Writing a Hugging Face folder, so that a reader never sees half a file, nor a folder that looks whole and is not."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from relax_sdk.model_export import SHARD_SIZE
from relax_server.machine_limits import check_room, limits_told
from relax_server.models.families import TABLE
from relax_server.models.weight_files import INDEX, WEIGHTS
from relax_server.training.megatron.hf import HfWeights, WithUntrained

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


def write_weights(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write `model.safetensors` under another name and rename it; one tensor at a time is in memory.

    Raises:
        DiskFull: no room for it; nothing is written.
    """
    like = _like(weights)
    folder.mkdir(parents=True, exist_ok=True)
    check_room(folder, sum(t.nbytes for t in like.values()), WEIGHTS)
    with limits_told(f"{WEIGHTS} cannot be written", folder, writes=True), _renamed(folder / WEIGHTS) as file:
        write_tensors(like, weights, file)


def write_folder(source: Path, weights: Mapping[str, Tensor], folder: Path, shard_size: int = SHARD_SIZE) -> list[str]:
    """Write a whole model folder, in place of the one that is there: all is on the disk before it has its name.

    Args:
        source: a model folder; all of it but its weights is copied: configuration, tokenizer, chat template, preprocessor.
        weights: by the names that they have in the folder; one tensor at a time is in memory.
        folder: to be written.
        shard_size: bytes of the tensors in one file, at most; a larger tensor has a file of its own. Where all fit into one
            file, that is `model.safetensors`, and otherwise there is an index.

    Returns:
        Names of the files that hold the weights.

    Raises:
        DiskFull: no room for it; nothing is written.
    """
    like = _like(weights)
    shards = plan_shards(like, shard_size)
    files = [f for f in source.iterdir() if f.is_file() and not f.name.startswith(".")]
    rest = [f for f in files if f.name in _KEPT or not f.name.endswith(_NOT_COPIED)]
    total = sum(t.nbytes for t in like.values())
    check_room(folder.parent, total + sum(file.stat().st_size for file in rest), f"the model folder {folder.name}")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with limits_told("the model folder cannot be written", folder, writes=True):
            partial.mkdir(parents=True)
            for file in rest:
                shutil.copyfile(file, partial / file.name)
            for name, tensors in shards.items():
                with _renamed(partial / name, durable=True) as file:
                    write_tensors({key: like[key] for key in tensors}, weights, file)
            if len(shards) > 1:
                names = {key: name for name, tensors in shards.items() for key in tensors}
                index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
                with _renamed(partial / INDEX, durable=True) as file:
                    file.write(json.dumps(index, indent=1).encode())
            _sync(partial)
            replace_folder(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [*shards]


def plan_shards(like: Mapping[str, Tensor], shard_size: int) -> dict[str, list[str]]:
    """Names of the tensors of each file, in the order that they are given in."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in like.items():
        if shards[-1] and size + tensor.nbytes > shard_size:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{number:05}-of-{len(shards):05}.safetensors": names for number, names in enumerate(shards, 1)}


def write_tensors(like: Mapping[str, Tensor], weights: Mapping[str, Tensor], file: BinaryIO) -> None:
    """Write one file in the safetensors format; one tensor at a time is in memory.

    Args:
        like: the tensors of this file: shapes and dtypes; they may be on the meta device.
        weights: holds the tensors of these names.
        file: to write to, at its beginning.
    """
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(like, key=lambda n: -like[n].element_size()):  # so that each begins at a multiple of its element's size
        begin, end = end, end + like[name].nbytes
        head[name] = {"dtype": NAMES[like[name].dtype], "shape": list(like[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in like:
        tensor = weights[name].contiguous().cpu()
        file.seek(8 + len(text) + head[name]["data_offsets"][0])
        file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def replace_folder(new: Path, folder: Path) -> None:
    """Give a folder that is written its name; one of that name goes away."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def _like(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Shapes and dtypes of weights, without making those that are made on request."""
    return weights.like() if isinstance(weights, (HfWeights, WithUntrained)) else weights


@contextmanager
def _renamed(path: Path, durable: bool = False) -> Iterator[BinaryIO]:
    """A file under another name, which it loses when all is written; `durable`: and on the disk."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Checkpoints in Megatron's distributed format: written beside their place and renamed, refused if they do not fit."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from relax_sdk.errors import CheckpointError
from relax_server.training.megatron.trainer import MegatronTrainer

FORMAT = 1
HEADER = "relax.json"


def differences(ours: Any, theirs: Any, at: str = "") -> list[str]:
    """Where two pieces of plain data differ, as `path: theirs here ours`."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = []
        for key in sorted(set(ours) | set(theirs)):
            found += differences(ours.get(key), theirs.get(key), f"{at}.{key}" if at else key)
        return found
    return [] if ours == theirs else [f"{at}: {theirs!r} in the checkpoint, {ours!r} here"]


def _plain(data: Any) -> Any:
    """As JSON would give it back, so that tuples and lists compare equal."""
    return json.loads(json.dumps(data))


@contextlib.contextmanager
def _write_in_this_process() -> Iterator[None]:
    """Megatron forks writers and keeps a server process for their results, which outlives a killed trainer, and it waits
    without limit for writers that died. A synchronous save needs neither."""
    writer: Any = filesystem_async.FileSystemWriterAsync
    name = "write_preloaded_data_multiproc"
    original = writer.__dict__[name]

    def write(transforms: Any, use_msc: bool, rank: int, buckets: list[Any], results: Any) -> None:
        done: dict[int, Any] = {}
        for i, bucket in enumerate(buckets):
            local, count = queue.Queue(), queue.Queue()
            count.put(i)
            writer.write_preloaded_data(transforms, i, bucket, local, count, True)
            _, done[i] = local.get_nowait()
            if isinstance(done[i], Exception):
                raise done[i]
        results.put(done)

    setattr(writer, name, staticmethod(write))
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        setattr(writer, name, original)
        filesystem_async._results_queue = before


def _tracker() -> Any:
    """Megatron's generators."""
    return get_cuda_rng_tracker()


def _state(trainer: MegatronTrainer) -> dict[str, Any]:
    """Model and optimizer as Megatron shards them.

    AdamW makes its moments and step counts at its first step; here they are made if it has not, with the same numbers.
    """
    for chained in trainer.optimizer.chained_optimizers:
        chained.init_state_fn(chained.optimizer, chained.config)
        for parameter, state in chained.optimizer.state.items():
            state.setdefault("step", torch.zeros((), device=parameter.device))
    model = trainer.model.sharded_state_dict()
    return {"model": model, "optimizer": trainer.optimizer.sharded_state_dict(model)}


def _with_step(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Megatron does not write a step count of zero."""
    inner = optimizer.get("optimizer", optimizer)
    inner["state"].setdefault("common_step", torch.zeros(()))
    return optimizer


def save(folder: Path, trainer: MegatronTrainer, *, identity: dict[str, Any], step: int, meta: dict[str, Any]) -> None:
    """Write model, optimizer, generators, step and `meta`; every rank calls it.

    Args:
        folder: replaced if it exists; a reader sees the old or the new one, never half of one.
        trainer: whose state it is.
        identity: plain data that a later `load` must match.
        step: training steps done.
        meta: plain data, given back by `load`.

    Raises:
        CheckpointError: it cannot be written.
    """
    rank = dist.get_rank()
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        state = _state(trainer)
        state["generators"] = {"torch": torch.get_rng_state(), "megatron": _tracker().get_states()}
        with _write_in_this_process():
            dist_checkpointing.save(state, str(partial))
        if rank == 0:
            header = {"format": FORMAT, "step": step, "identity": identity, "meta": meta}
            (partial / HEADER).write_text(json.dumps(header, indent=1))
            _replace(partial, folder)
        dist.barrier()
    except (OSError, TypeError, ValueError, CheckpointException) as error:
        raise CheckpointError(f"{folder}: the checkpoint cannot be written ({error})") from error


def _replace(new: Path, folder: Path) -> None:
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def read_header(folder: Path) -> dict[str, Any]:
    """`format`, `step`, `identity` and `meta` of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    try:
        header = json.loads((folder / HEADER).read_text())
        if header["format"] != FORMAT:
            raise CheckpointError(f"{folder}: checkpoint format {header['format']}, this version reads {FORMAT}")
        return header
    except OSError as error:
        raise CheckpointError(f"{folder}: not a checkpoint ({error.strerror}: {HEADER})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: {HEADER} is damaged ({error})") from error


def load(folder: Path, trainer: MegatronTrainer, *, identity: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Read back what `save` wrote; every rank calls it.

    Returns:
        The number of training steps done, and `meta`.

    Raises:
        CheckpointError: missing, damaged, or of another model or configuration; the differences are named.
    """
    header = read_header(folder)
    found = differences(_plain(identity), header["identity"])
    if found:
        raise CheckpointError(f"{folder} belongs to another run: " + "; ".join(found[:8]) + (" …" if len(found) > 8 else ""))
    try:
        state: Any = dist_checkpointing.load(_state(trainer), str(folder))
        trainer.model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(_with_step(state["optimizer"]))
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        raise CheckpointError(f"{folder}: the checkpoint is damaged ({type(error).__name__}: {error})") from error
    torch.set_rng_state(state["generators"]["torch"])
    _tracker().set_states(state["generators"]["megatron"])
    return header["step"], header["meta"]

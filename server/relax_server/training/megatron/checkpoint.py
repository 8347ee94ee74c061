"""Checkpoints in Megatron's distributed format: written beside their place and renamed, refused if they do not fit."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from relax_sdk.errors import CheckpointError
from relax_server.machine_limits import refusal
from relax_server.training.megatron import optimizer_state, parallel
from relax_server.training.megatron.interleaved import RankModel
from relax_server.training.megatron.saving import HEADER, Saving, cause_of, fingerprint
from relax_server.training.megatron.trainer import MegatronTrainer

FORMAT, READ = 4, (2, 3, 4)
"""Formats of the checkpoints that are written, and of those that can be read."""
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
"""A file with one of these errors is not there; any other error says that it cannot be read or written now."""


def differences(ours: Any, theirs: Any, at: str = "") -> list[str]:
    """List the places where two pieces of plain data differ, as `path: theirs here ours`."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = []
        for key in sorted(set(ours) | set(theirs)):
            found += differences(ours.get(key), theirs.get(key), f"{at}.{key}" if at else key)
        return found
    return [] if ours == theirs else [f"{at}: {theirs!r} in the checkpoint, {ours!r} here"]


def _plain(data: Any) -> Any:
    """Return data as JSON would give it back, so that tuples and lists compare equal."""
    return json.loads(json.dumps(data))


def _tracker() -> Any:
    """Megatron's generators."""
    return get_cuda_rng_tracker()


def _state(trainer: MegatronTrainer, header: dict[str, Any] | None = None) -> dict[str, Any]:
    """Model and optimizer as Megatron shards them.

    Args:
        trainer: has them.
        header: of the checkpoint that they are to be filled from; None: they are to be written.
    """
    model, masters = _weights(trainer.model), optimizer_state.MASTERS
    if header is not None and header["format"] < 4 and "layout" in header["identity"]:  # it has a divided optimizer
        masters = optimizer_state.OLD_MASTERS
    shards = optimizer_state.sharded_state(trainer.optimizer, model, loading=header is not None, masters=masters)
    return {"model": model, "optimizer": shards}


def _weights(model: RankModel) -> dict[str, Any]:
    """What a checkpoint holds of a model: all of it but the weights that are not trained, which its folder has."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {
        prefix + name: shard
        for prefix, part in model.named_parts()
        for name, shard in part.sharded_state_dict().items()
        if prefix + name not in frozen
    }


def _take_weights(model: RankModel, state: dict[str, Any]) -> None:
    """The inverse of `_weights`.

    Raises:
        RuntimeError: a weight that is trained is missing, or one is not of this model.
    """
    missing, unexpected = model.load_state_dict(state, strict=False)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = sorted(trained & {*missing})
    if missing or unexpected:
        raise RuntimeError(f"Error(s) in loading state_dict: missing {missing[:4]}, unexpected {unexpected[:4]}")


def _restore_generators(saved: Any) -> None:
    """Take the generators of this rank; in another layout than the checkpoint's, those of rank 0."""
    states = saved if isinstance(saved, list) else [saved]  # format 2 has those of the one rank
    own = states[parallel.rank()] if len(states) == parallel.layout().ranks else states[0]
    torch.set_rng_state(own["torch"])
    _tracker().set_states(own["megatron"])


def begin(
    folder: Path, trainer: MegatronTrainer, *, identity: dict[str, Any], step: int, meta: dict[str, Any], waits: bool = False
) -> Saving:
    """Take model, optimizer, generators, step and `meta` as they are now, and begin to write them; every rank calls it.

    Args:
        folder: replaced if it exists; a reader sees the old or the new one, never half of one.
        trainer: holds the state.
        identity: plain data that a later `load` must match.
        step: training steps done.
        meta: plain data, given back by `load`.
        waits: nothing is trained before it has ended, so that nothing need be copied.

    Raises:
        CheckpointError: `meta` or `identity` are not plain data.
        DiskFull, OutOfMemory: the disk has no room, or there is no memory left; with advice.
        TrainingError: the machine refuses for another reason: too many open files, a failing disk.
    """
    try:
        header = {"format": FORMAT, "step": step, "identity": _plain(identity), "meta": _plain(meta)}
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: the checkpoint cannot be written ({error})") from error

    def state() -> dict[str, Any]:
        generators = parallel.gather({"torch": torch.get_rng_state(), "megatron": _tracker().get_states()})
        return _state(trainer) | {"generators": generators}

    with trainer.optimizer_here():
        return Saving(state, header, folder, waits and not trainer.offload)


def _damage(folder: Path, files: dict[str, dict[str, Any]]) -> str | None:
    """Say what is wrong with the files of a checkpoint, or None.

    Raises:
        OSError: a file is there, but cannot be read now.
    """
    for name, wanted in files.items():
        try:
            size = (folder / name).stat().st_size
            if size != wanted["size"]:
                return f"{name} has {size} bytes, {wanted['size']} were written"
            if fingerprint(folder / name) != wanted:
                return f"{name} has other contents than were written"
        except OSError as error:
            if error.errno not in ABSENT:
                raise
            return f"{name} is missing"
    return None


def _does_not_fit(error: BaseException) -> bool:
    """Whether an error in loading files that are whole says that they hold something else, not that the machine refuses."""
    if isinstance(error, RuntimeError):
        return str(error).startswith("Error(s) in loading state_dict")
    return isinstance(error, (CheckpointingException, KeyError, ValueError, AssertionError))


def read_header(folder: Path) -> dict[str, Any]:
    """`format`, `step`, `identity`, `meta` and `files` of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
        TrainingError: it cannot be read now.
    """
    try:
        header = json.loads((folder / HEADER).read_text())
        if header["format"] not in READ:
            raise CheckpointError(f"{folder}: checkpoint format {header['format']}, this version reads {READ[0]} to {READ[-1]}")
        return {name: header[name] for name in ("format", "step", "identity", "meta", "files")}
    except OSError as error:
        if error.errno in ABSENT:
            raise CheckpointError(f"{folder}: not a checkpoint ({error.strerror}: {HEADER})") from error
        raise refusal(error, "it cannot be read now", folder / HEADER) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: {HEADER} is damaged ({error})") from error


def load(folder: Path, trainer: MegatronTrainer, *, identity: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Read back what `begin` wrote; every rank calls it.

    Returns:
        The number of training steps done, and `meta`.

    Raises:
        CheckpointError: missing, damaged (the file is named), or of another model or configuration; the differences are named.
        OutOfMemory: there is no memory left, on the machine or the device; with advice. The checkpoint may be whole.
        TrainingError: the machine refuses for another reason: too many open files, a failing disk.
    """
    header = _fitting_header(folder, _plain(identity))
    with _failures_told(folder), trainer.optimizer_here():
        _check_files(folder, header)
        state: Any = dist_checkpointing.load(_state(trainer, header), str(folder))
        _take_weights(trainer.model, state["model"])
        optimizer_state.load(trainer.optimizer, state["optimizer"])
    _restore_generators(state["generators"])
    return header["step"], header["meta"]


def load_model(folder: Path, model: RankModel, *, identity: dict[str, Any]) -> int:
    """Read the weights alone of what `begin` wrote; no optimizer is needed. Every rank calls it.

    Args:
        folder: of the checkpoint.
        model: takes the weights.
        identity: the part of it that says which model this is: `{"model": …}`.

    Returns:
        The number of training steps done.

    Raises:
        CheckpointError, OutOfMemory, TrainingError: as `load`.
    """
    header = _fitting_header(folder, _plain(identity))
    with _failures_told(folder):
        _check_files(folder, header)
        state: Any = dist_checkpointing.load({"model": _weights(model)}, str(folder))
        _take_weights(model, state["model"])
    return header["step"]


def _fitting_header(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """The header of a checkpoint.

    Raises:
        CheckpointError: what `identity` has is not the same there.
    """
    header = read_header(folder)
    found = differences(identity, {name: header["identity"].get(name) for name in identity})
    if found:
        raise CheckpointError(f"{folder} belongs to another run: " + "; ".join(found[:8]) + (" …" if len(found) > 8 else ""))
    return header


def _check_files(folder: Path, header: dict[str, Any]) -> None:
    """Refuse a damaged checkpoint, on all ranks.

    Raises:
        CheckpointError: a file is missing, or not as it was written.
    """
    damage = [_damage(folder, header["files"]) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(damage)
    if damage[0] is not None:
        raise CheckpointError(f"{folder}: the checkpoint is damaged: {damage[0]}")


@contextmanager
def _failures_told(folder: Path) -> Iterator[None]:
    """Tell apart a checkpoint that does not fit and a machine that cannot load it.

    Raises:
        CheckpointError, OutOfMemory, TrainingError: as `load`.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        cause = cause_of(error)
        if _does_not_fit(cause):
            raise CheckpointError(f"{folder}: the checkpoint does not fit ({type(cause).__name__}: {cause})") from error
        raise refusal(cause, "the checkpoint cannot be loaded now", folder) from error

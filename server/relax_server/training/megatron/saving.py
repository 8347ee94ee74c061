"""A checkpoint that is being written: its contents are taken at once, and the files are written while training goes on."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from relax_server.machine_limits import refusal
from relax_server.training.megatron import parallel
from relax_server.training.megatron.folder import replace_folder

HEADER = "relax.json"
"""The file of a checkpoint that says what it is; written last."""


class Shards(AsyncSaveShardedStrategy):
    """Megatron's format `torch_dist`, written by torch itself.

    Megatron's own strategy forks writers and keeps a server process for their results, which outlives a killed trainer, and
    it waits without limit for writers that died. What it does to names and shards before it writes is done here by the same
    functions, so its loader reads the result.

    Args:
        copied: the shards are copied, so that they may change while they are written.
    """

    def __init__(self, copied: bool) -> None:
        super().__init__("torch_dist", 1)
        self._copied = copied

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> AsyncRequest:
        """Take the shards of this rank as they are now; the request writes them, and waits for those of the other ranks."""
        state, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        if self._copied:
            dict_list_map_inplace(_copy, state)
        taken = torch_dist.mcore_to_pyt_state_dict(state, is_loading=False)  # objects are pickled by it
        return AsyncRequest(_write_shards, (taken, Path(checkpoint_dir)), [])

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Take the shards of this rank, and write them before this returns."""
        request: Any = self.async_save(sharded_state_dict, checkpoint_dir)
        request.async_fn(*request.async_fn_args)


def _copy(shard: Any) -> Any:
    if isinstance(shard, ShardedTensor) and shard.data is not None:
        shard.data = shard.data.detach().to("cpu", copy=True)
    return shard


def _write_shards(state: Any, folder: Path) -> None:
    """Write a rank's shards; it ends on rank 0 when those of all ranks are written."""
    save_state(
        state,
        storage_writer=FileSystemWriter(folder),
        planner=torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        process_group=parallel.saving_group(),
        no_dist=parallel.layout().ranks == 1,
    )


class Saving:
    """One checkpoint on its way to the disk; every rank has one.

    Args:
        state: makes what `dist_checkpointing.save` takes.
        header: of the checkpoint, without its files.
        folder: replaced when all is written; a reader sees the old or the new one, never half of one.
        waits: nothing changes before `finish`, so that nothing need be copied.

    Raises:
        DiskFull, OutOfMemory: the disk has no room, or there is no memory left; with advice.
        TrainingError: the machine refuses for another reason: too many open files, a failing disk.
    """

    def __init__(self, state: Callable[[], dict[str, Any]], header: dict[str, Any], folder: Path, waits: bool) -> None:
        self.folder = folder
        self._partial = folder.with_name(f".{folder.name}.partial")
        self._header = header
        self.began = self.ended = time.time()
        """Unix seconds."""
        self._error: BaseException | None = None
        with parallel.together(), self._refusals():
            if parallel.leads():
                shutil.rmtree(self._partial, ignore_errors=True)
                self._partial.mkdir(parents=True)
        with self._refusals():
            strategy = Shards(copied=not waits)
            self._request: Any = dist_checkpointing.save(state(), str(self._partial), strategy, async_sharded_save=True)
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                self._request.async_fn(*self._request.async_fn_args)
            if parallel.leads():
                save_config(CheckpointingConfig("torch_dist", 1), str(self._partial))
                self._header["files"] = {file.name: fingerprint(file) for file in sorted(self._partial.iterdir())}
                (self._partial / HEADER).write_text(json.dumps(self._header, indent=1))
                replace_folder(self._partial, self.folder)
        except BaseException as error:
            self._error = error
        self._request = None  # its copies are not needed any more
        self.ended = time.time()

    @property
    def done(self) -> bool:
        """Whether `finish` need not wait. On rank 0 it is true when all ranks have written and the checkpoint has its name."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until the checkpoint is complete; every rank calls it.

        On a disk that hangs it waits as long: the controller kills a trainer that is silent for `training.step_timeout`.

        Raises:
            DiskFull, OutOfMemory, TrainingError: as when it was begun.
        """
        with parallel.together(), self._refusals():
            self._thread.join()  # that of rank 0 is the last one: it gives the folder its name
            if self._error is not None:
                raise self._error

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Say what the machine refuses, and leave no half a checkpoint."""
        try:
            yield
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            told = refusal(cause_of(error), "the checkpoint cannot be written now", self.folder, writes=True)
            shutil.rmtree(self._partial, ignore_errors=True)
            raise told from error


def fingerprint(file: Path) -> dict[str, Any]:
    """Size and hash of a file of a checkpoint."""
    with file.open("rb") as stream:
        return {"size": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def cause_of(error: BaseException) -> BaseException:
    """The error itself; torch wraps those of its ranks in one of its own."""
    if isinstance(error, CheckpointException) and error.failures:
        wrapped = next(iter(error.failures.values()))
        return wrapped[0] if isinstance(wrapped, tuple) else wrapped
    return error

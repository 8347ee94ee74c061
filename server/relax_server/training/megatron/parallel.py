"""The process group and Megatron's parallel state: NCCL with CUDA, gloo without."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from relax_sdk.errors import RelaxError, TrainingError
from relax_sdk.layout import LayoutConfig
from relax_server.training.algorithms.vocabulary import VocabularyShard
from relax_server.training.megatron import cpu

TIMEOUT = 300.0
"""Seconds that a collective operation may take where nobody says."""

SHARED = "All ranks of the policy have stopped at this error."
"""Note of an error that every rank has raised, so that they are still at the same place."""

_layout = LayoutConfig()
_control: Any = None
"""Group of all ranks for plain data and numbers on the CPU; None: the default group."""
_calls: Any = None
"""Group of all ranks in which they wait for what rank 0 wants done."""
_saving: Any = None
"""Group of all ranks in which they write a checkpoint while they train."""
IDLE = timedelta(days=365)
"""How long a rank waits for rank 0; when that process ends, so does the wait."""


def initialize(
    *,
    seed: int,
    layout: LayoutConfig | None = None,
    rank: int = 0,
    store: Any = None,
    timeout: float = TIMEOUT,
) -> None:
    """Join the other ranks and seed Megatron's generators; may be called again with the same layout.

    Args:
        seed: for torch's and Megatron's generators.
        layout: how the ranks share the work; None takes the group as it is, or makes a group of one.
        rank: this process's number, from 0.
        store: where the ranks meet, see `relax_server.training.ranks.rendezvous`; needed with more than one.
        timeout: seconds that a rank waits for the others in a collective operation.

    Raises:
        TrainingError: the group exists already with another layout, or several ranks have no place to meet at.
    """
    global _layout
    cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        _layout = layout or LayoutConfig()
        _join(rank, _layout.ranks, store, timedelta(seconds=timeout))
    elif layout not in (None, _layout):
        raise TrainingError(f"this process has the layout {_layout} already; it cannot take {layout}")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=_layout.tp,
            pipeline_model_parallel_size=_layout.pp,
            virtual_pipeline_model_parallel_size=_layout.vpp if _layout.vpp > 1 else None,
            context_parallel_size=_layout.cp,
            expert_model_parallel_size=_layout.ep,
            expert_tensor_parallel_size=_layout.etp,
        )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def _join(rank: int, ranks: int, store: Any, timeout: timedelta) -> None:
    global _control, _calls, _saving
    if store is None:
        if ranks > 1:
            raise TrainingError(f"{ranks} ranks need a place to meet at: parallel.initialize(store=...)")
        stores: Any = dist
        store = stores.HashStore()
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    if ranks > 1:
        _control = dist.new_group(backend="gloo", timeout=timeout) if backend != "gloo" else None
        _calls = dist.new_group(backend="gloo", timeout=IDLE)
        _saving = dist.new_group(backend="gloo", timeout=timeout)


def shutdown() -> None:
    """Leave the group.

    Models and optimizers hold on to its process groups in circles; each group has threads, which end when it is collected.
    """
    global _layout, _control, _calls, _saving
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    _layout, _control, _calls, _saving = LayoutConfig(), None, None, None
    gc.collect()


def layout() -> LayoutConfig:
    """How the ranks of this process's group share the work."""
    return _layout


def saving_group() -> Any:
    """The process group in which all ranks write a checkpoint, beside what they compute together; None: there is one rank."""
    return _saving


def device() -> torch.device:
    """The device that tensors of this rank live on."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


# ------------------------------------------------------------------------------------------------------------- this rank


def rank() -> int:
    """Number of this process among all ranks; rank 0 leads them."""
    return dist.get_rank()


def leads() -> bool:
    """Whether this is the rank that does what is done once: rank 0, also where there is no group."""
    return not dist.is_initialized() or dist.get_rank() == 0


def data_parallel() -> tuple[int, int]:
    """(rank, size) of this process among those that hold other parts of the batch."""
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


def tensor_parallel() -> tuple[int, int]:
    """(rank, size) of this process among those that share every layer."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def vocabulary() -> VocabularyShard | None:
    """This rank's part of the vocabulary; None where it is not divided."""
    from megatron.core import parallel_state

    rank, size = tensor_parallel()
    return VocabularyShard(rank, size, parallel_state.get_tensor_model_parallel_group()) if size > 1 else None


def context_parallel() -> tuple[int, int]:
    """(rank, size) of this process among those that share the tokens of a forest."""
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()


def stage() -> int:
    """Number of this rank's pipeline stage."""
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_rank()


def is_first_stage() -> bool:
    """Whether this rank has the embedding."""
    from megatron.core import parallel_state

    return parallel_state.is_pipeline_first_stage()


def is_last_stage() -> bool:
    """Whether this rank has the output layer."""
    from megatron.core import parallel_state

    return parallel_state.is_pipeline_last_stage()


def reports() -> bool:
    """Whether this rank reports what it computed: of those that have the same results, one does."""
    return is_last_stage() and tensor_parallel()[0] == 0


# ------------------------------------------------------------------------------------------------- numbers of all ranks


def sum_over_ranks(values: list[float]) -> list[float]:
    """Element-wise sum over the ranks that report."""
    return _reduce(values, dist.ReduceOp.SUM, 0.0)


def max_over_ranks(values: list[float]) -> list[float]:
    """Element-wise maximum over the ranks that report."""
    return _reduce(values, dist.ReduceOp.MAX, -np.inf)


def known_on_any_rank(values: np.ndarray) -> np.ndarray:
    """Each value that a rank knows, float32 [n]; NaN where none does. One that several know is their mean."""
    if _layout.ranks == 1:
        return values
    known = np.isfinite(values)
    both = torch.from_numpy(np.stack([np.where(known, values, 0.0), known])).float()
    dist.all_reduce(both, group=_control)
    total, count = both.numpy()
    return np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(np.float32)


def _reduce(values: list[float], operation: dist.ReduceOp.RedOpType, nothing: float) -> list[float]:
    if _layout.ranks == 1:
        return values
    tensor = torch.tensor(values if reports() else [nothing] * len(values), dtype=torch.float64)
    dist.all_reduce(tensor, operation, group=_control)
    return tensor.tolist()


def gather(value: Any) -> list[Any]:
    """Plain data of every rank, in their order, on every rank."""
    if _layout.ranks == 1:
        return [value]
    out: list[Any] = [None] * _layout.ranks
    dist.all_gather_object(out, value, group=_control)
    return out


def to_lead(value: Any) -> list[Any]:
    """Plain data or tensors of every rank, in their order, on rank 0; the other ranks get an empty list."""
    if _layout.ranks == 1:
        return [value]
    if not leads():
        dist.send_object_list([value], 0, group=_control)
        return []
    out = [value]
    for rank in range(1, _layout.ranks):
        box: list[Any] = [None]
        dist.recv_object_list(box, rank, group=_control)
        out += box
    return out


def from_lead(value: Any) -> Any:
    """Plain data of rank 0, on every rank; the others wait for it as long as it takes.

    Args:
        value: of rank 0; the other ranks' is not looked at.
    """
    if _layout.ranks == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, 0, group=_calls)
    return box[0]


@contextmanager
def together() -> Iterator[None]:
    """Run a block on every rank, and go on when all have done it; an error of one is raised on all.

    The block must not wait for other ranks. Errors that are not of this project pass: they end the process.

    Raises:
        RelaxError: of the first rank that has one. `is_shared` is true of it.
    """
    failed: RelaxError | None = None
    try:
        yield
    except RelaxError as error:
        if _layout.ranks == 1:
            raise
        failed = error
    if _layout.ranks == 1:
        return
    flag = torch.tensor([failed is not None], dtype=torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=_control)
    if not flag.item():
        return
    first = next(error for error in gather(failed) if error is not None)
    shared = failed if failed is not None and str(failed) == str(first) else first
    shared.add_note(SHARED)
    raise shared


def is_shared(error: BaseException) -> bool:
    """Whether an error was raised by every rank at the same place, so that they can go on together."""
    return _layout.ranks == 1 or SHARED in getattr(error, "__notes__", ())

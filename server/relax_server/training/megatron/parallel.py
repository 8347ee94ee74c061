"""The process group and Megatron's parallel state: NCCL with CUDA, gloo without."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from relax_sdk.errors import TrainingError
from relax_server.training.megatron import cpu

TIMEOUT = timedelta(seconds=300)
"""How long a collective operation may take."""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago, for the rendezvous of several ranks."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def initialize(
    *,
    seed: int,
    rank: int | None = None,
    world_size: int | None = None,
    port: int | None = None,
    host: str = "127.0.0.1",
) -> None:
    """Join the data-parallel group and seed Megatron's generators; may be called again with the same shape.

    Args:
        seed: for torch's and Megatron's generators.
        rank: this process's number, from 0; None takes the group as it is, or makes a group of one.
        world_size: number of data-parallel processes; None as above.
        port: where rank 0 listens; needed with more than one rank.
        host: rank 0's address.

    Raises:
        TrainingError: the group exists already with another size, or several ranks have no port to meet at.
    """
    cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if dist.is_initialized():
        now = (dist.get_rank(), dist.get_world_size())
        if now != (now[0] if rank is None else rank, now[1] if world_size is None else world_size):
            raise TrainingError(f"this process is rank {now[0]} of {now[1]} already; it cannot become {rank} of {world_size}")
    else:
        _join(rank or 0, world_size or 1, host, port)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def _join(rank: int, world_size: int, host: str, port: int | None) -> None:
    stores: Any = dist
    if world_size == 1:
        store = stores.HashStore()
    elif port is None:
        raise TrainingError(f"{world_size} ranks need a port to meet at: parallel.initialize(port=...)")
    else:
        store = stores.TCPStore(host, port, world_size, is_master=rank == 0, timeout=TIMEOUT)
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)


def shutdown() -> None:
    """Leave the group."""
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def data_parallel() -> tuple[int, int]:
    """(rank, size) of this process among its data-parallel peers."""
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


def tensor_parallel() -> tuple[int, int]:
    """(rank, size) of this process among those that share every layer."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def device() -> torch.device:
    """The device that tensors of this rank live on."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def sum_over_ranks(values: list[float]) -> list[float]:
    """Element-wise sum over the data-parallel ranks."""
    return _reduce(values, dist.ReduceOp.SUM)


def max_over_ranks(values: list[float]) -> list[float]:
    """Element-wise maximum over the data-parallel ranks."""
    return _reduce(values, dist.ReduceOp.MAX)


def known_on_any_rank(values: np.ndarray) -> np.ndarray:
    """Each value that a data-parallel rank knows, float32 [n]; NaN where none does. One that several know is their mean."""
    from megatron.core import parallel_state

    if data_parallel()[1] == 1:
        return values
    known = np.isfinite(values)
    both = torch.from_numpy(np.stack([np.where(known, values, 0.0), known])).to(device(), torch.float32)
    dist.all_reduce(both, group=parallel_state.get_data_parallel_group())
    total, count = both.cpu().numpy()
    return np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(np.float32)


def _reduce(values: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
    from megatron.core import parallel_state

    if data_parallel()[1] == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device())
    dist.all_reduce(tensor, operation, group=parallel_state.get_data_parallel_group())
    return tensor.tolist()

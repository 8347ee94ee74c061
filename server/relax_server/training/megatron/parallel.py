"""The process group and Megatron's parallel state: NCCL with CUDA, gloo without."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from relax_sdk.errors import TrainingError
from relax_server.training.megatron import cpu

TIMEOUT = timedelta(seconds=300)
"""Of every collective."""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago, for the rendezvous of several ranks."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def initialize(*, seed: int, rank: int = 0, world_size: int = 1, port: int | None = None, host: str = "127.0.0.1") -> None:
    """Join the data-parallel group and seed Megatron's generators; may be called again with the same shape.

    Args:
        seed: Of torch and of Megatron's generators.
        rank: Of this process, 0-based.
        world_size: Data-parallel size.
        port: Where rank 0 listens; needed with more than one rank.
        host: Of rank 0.

    Raises:
        TrainingError: the group exists already with another size, or several ranks have no port to meet at.
    """
    cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise TrainingError(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already; it cannot become {rank} of {world_size}"
            )
    else:
        if world_size == 1:
            store: dist.Store = dist.HashStore()
        elif port is None:
            raise TrainingError(f"{world_size} ranks need a port to meet at: parallel.initialize(port=...)")
        else:
            store = dist.TCPStore(host, port, world_size, is_master=rank == 0, timeout=TIMEOUT)
        backend = "gloo"
        if torch.cuda.is_available():
            backend = "nccl"
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


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


def device() -> torch.device:
    """Where tensors of this rank live."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

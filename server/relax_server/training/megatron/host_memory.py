"""What a trainer holds on its device, and a place in the machine's memory for it while it is not needed there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

LEAST = 1024
"""Bytes of a storage that is worth moving; smaller ones, such as counts of steps, stay."""


def gradients(wrapped: Sequence[Any]) -> list[Tensor]:
    """The buffers of all gradients of the parts of a Megatron model, each in its data-parallel wrapper."""
    return [buffer.grad_data for part in wrapped for buffer in (*part.buffers, *part.expert_parallel_buffers)]


def optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """Masters and moments of Megatron's optimizer; where it has no masters, the weights that it trains are among them."""
    found: list[Tensor] = []
    for chained in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = chained.optimizer
        if inner is None:  # a rank without parameters of its kind
            continue
        found += [parameter for group in inner.param_groups for parameter in group["params"]]
        found += [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
    return found


class HostMemory:
    """Contents of tensors that are in the machine's memory for a while; their own storages have no bytes meanwhile.

    Storages are emptied and filled again, so that every view of them stays one.
    """

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, Tensor]] = []

    def take(self, tensors: Iterable[Tensor], but: Iterable[Tensor] = ()) -> None:
        """Take the contents of tensors away from their device.

        Args:
            tensors: several may share a storage.
            but: storages of these stay.
        """
        seen = {tensor.untyped_storage().data_ptr() for tensor in but}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() < LEAST or storage.data_ptr() in seen or not storage.resizable():
                continue  # numpy has seen the last kind, which is on the CPU
            seen.add(storage.data_ptr())
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
            copy.copy_(_bytes(storage, tensor.device))
            storage.resize_(0)
            self._held.append((storage, copy))

    def give_back(self) -> None:
        """Put all contents back where they were."""
        for storage, copy in self._held:
            storage.resize_(copy.numel())
            _bytes(storage, storage.device).copy_(copy)
        self._held.clear()


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # type: ignore[call-overload] - torch's stub knows no untyped storage

"""The KL reference inside the policy's own process: what the policy was when reinforcement learning began."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from relax_server.training.megatron import lora
from relax_server.training.megatron.adapter import is_adapter


class KeptReference:
    """A frozen reference that shares with the policy all that is not trained.

    It keeps copies of the parameters that are trained. Adapters that add nothing when reinforcement learning begins, as all do
    that no warm-up has trained, need none: the reference is the model with its adapters switched off.

    Args:
        model: the policy's, as it is now.
        values: parameters of the reference by name, where it is not what the model is now; those that are missing are the
            model's.
    """

    def __init__(self, model: torch.nn.Module, values: Mapping[str, Tensor] | None = None) -> None:
        self._model = model
        given = values or {}
        now = {name: p for name, p in model.named_parameters() if p.requires_grad}
        added = [given.get(name, p.detach()) for name, p in now.items() if is_adapter(name) and ".lora_B." in name]
        self._without_adapters = not any(bool(b.any()) for b in added)
        kept = {name: p for name, p in now.items() if not (self._without_adapters and is_adapter(name))}
        self._pairs: list[tuple[Any, Tensor]] = [
            (p, given[name].to(p.device, p.dtype) if name in given else p.detach().clone()) for name, p in kept.items()
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(tensor.nbytes for _, tensor in self._pairs)

    @property
    def tensors(self) -> list[Tensor]:
        """The copies."""
        return [tensor for _, tensor in self._pairs]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block the model is the reference; no gradient may be computed there."""
        with lora.switched_off(self._model) if self._without_adapters else contextlib.nullcontext():
            self._swap()
            try:
                yield
            finally:
                self._swap()

    def _swap(self) -> None:
        for number, (parameter, kept) in enumerate(self._pairs):
            self._pairs[number] = (parameter, parameter.data)
            parameter.data = kept

"""Which Hugging Face tensors are in a layer's weight: what adapters on it are called elsewhere, and how they are joined."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relax_server.training.megatron.link import Link
from relax_server.training.megatron.place import Place

Tensors = list[Tensor]

_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class AdaptedWeight:
    """A weight of Megatron, and the Hugging Face tensors of one layer each that it consists of."""

    names: tuple[str, ...]
    """Names of the tensors, without `.weight`: layers as a folder names them, experts one by one."""
    join: Callable[[Tensors], Tensor]
    """[outputs of each, ...] to [all outputs, ...], as they are arranged in the weight."""
    split: Callable[[Tensor], Tensors]
    """The inverse."""

    @property
    def short_names(self) -> tuple[str, ...]:
        """The last word of each name: `q_proj`."""
        return tuple(name.rpartition(".")[2] for name in self.names)


def adapted_weights(links: Sequence[Link], place: Place) -> dict[str, AdaptedWeight]:
    """What is in each weight of a rank's part of a model, by its Megatron name.

    Args:
        links: of the part.
        place: the part; experts are numbered in the whole model.
    """
    out: dict[str, AdaptedWeight] = {}
    for link in links:
        if not link.megatron[0].endswith(".weight"):
            continue
        fused = _FUSED.fullmatch(link.hf[0])
        if fused is None:
            out[link.megatron[0]] = _of_link(link)
            continue
        for expert, name in zip(place.experts, link.megatron, strict=True):
            out[name] = _of_fused(f"{fused[1]}.{expert}", fused[2])
    return out


def _of_link(link: Link) -> AdaptedWeight:
    names = tuple(name.removesuffix(".weight") for name in link.hf)
    return AdaptedWeight(names, lambda tensors: link.join(tensors)[0], lambda tensor: link.split([tensor]))


def _of_fused(expert: str, kind: str) -> AdaptedWeight:
    if kind == "down_proj":
        return AdaptedWeight((f"{expert}.down_proj",), lambda tensors: tensors[0], lambda tensor: [tensor])
    names = (f"{expert}.gate_proj", f"{expert}.up_proj")
    return AdaptedWeight(names, torch.cat, lambda tensor: list(tensor.chunk(2)))

"""The adapters of a whole model: where they are put, what is trained with them, and what the model is with and without them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relax_sdk.errors import ConfigError
from relax_sdk.tuning import TARGETS, TOWERS, LoraConfig, Tuning
from relax_server.training.megatron import parallel
from relax_server.training.megatron.adapted_weights import AdaptedWeight
from relax_server.training.megatron.adapter import ADAPTED, Adapter, Division, adapted_layers, is_adapter
from relax_server.training.megatron.interleaved import RankModel

PLACES = {
    "attention": (".self_attention.linear_qkv", ".self_attention.linear_proj"),
    "mlp": (".mlp.linear_fc1", ".mlp.linear_fc2"),
}
"""How the names of the layers end that a part of `TARGETS` stands for; experts and towers are found otherwise."""


def target_of(layer: str) -> str | None:
    """The part of `TARGETS` that a layer belongs to, by its name in the model; None: no adapter can be put on it."""
    tower = layer.partition(".")[0]
    if tower in TOWERS:
        return tower
    if ".experts." in layer:
        return "experts"
    return next((part for part, ends in PLACES.items() if layer.endswith(ends)), None)


def prepare(model: RankModel, adapted: Mapping[str, AdaptedWeight], tuning: Tuning, seed: int) -> set[str]:
    """Put the adapters on a rank's part of a model that has its weights, and say of each parameter whether it is trained.

    Args:
        model: all that the rank has.
        adapted: by the name of a layer's weight, see `adapted_weights`.
        tuning: what is trained.
        seed: of the adapters.

    Returns:
        The parts of `TARGETS` that have adapters now; those of all ranks are for `check_found`.
    """
    found: set[str] = set()
    for prefix, part in model.named_parts():
        if tuning.has_lora:
            for name, layer in [*part.named_modules()]:
                target = _adapt(prefix, name, layer, adapted, tuning, seed)
                found |= {target} if target is not None else set()
        for name, parameter in part.named_parameters():
            tower = name.partition(".")[0]
            whole = tuning.trains_whole(tower) if tower in TOWERS else not tuning.has_lora
            parameter.requires_grad_(whole or is_adapter(name))
    return found


def _adapt(prefix: str, name: str, layer: Any, adapted: Mapping[str, AdaptedWeight], tuning: Tuning, seed: int) -> str | None:
    """Put an adapter on a layer if it is to have one; returns the part of `TARGETS` that it belongs to then."""
    part, made = target_of(name), ADAPTED.get(type(layer))
    if part is None or made is None or not tuning.adapts(part):
        return None
    layer.__class__ = made
    layer.adapter = Adapter(layer.weight, adapted[f"{prefix}{name}.weight"], tuning.lora, seed, layer.cut, Division.of(layer))
    if getattr(layer, "sequence_parallel", False) and not layer.explicit_expert_comm:
        layer.adapter.of_sequence_parallel(layer.cut)
    return part


def check_found(found: set[str], lora: LoraConfig) -> None:
    """Compare the parts of a whole model that have adapters with those that are to have them.

    Raises:
        ConfigError: the model has none of these parts, or no such tower.
    """
    lacking = [tower for tower in TOWERS if tower in lora.targets and tower not in found]
    if not found or lacking:
        there = [part for part in TARGETS if part in found]
        raise ConfigError(
            f"LoraConfig.targets = {lora.targets!r}: the model has no {', '.join(lacking or lora.targets)}; it has "
            f"{', '.join(there) or 'other layers'}"
        )


def adapters(model: torch.nn.Module) -> dict[str, Adapter]:
    """The adapters of a model by the name of the layer's weight."""
    return {f"{name}.weight": layer.adapter for name, layer in adapted_layers(model).items()}


@contextlib.contextmanager
def switched_off(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block the model computes what it would without adapters; for passes without gradient."""
    found = [*adapters(model).values()]
    for adapter in found:
        adapter.on = False
    try:
        yield
    finally:
        for adapter in found:
            adapter.on = True


Pairs = dict[str, tuple[Tensor, Tensor]]
"""A [rank, inputs] and B [outputs, rank] by the name of the Hugging Face layer."""


def whole_pairs(model: RankModel) -> Pairs:
    """The adapters of a model on rank 0, joined from the parts of all ranks; nothing on the others. Every rank calls it."""
    parts = parallel.to_lead(_own_parts(model))
    of: dict[tuple[str, int], dict[int, Tensor]] = {}
    cuts: dict[str, int | None] = {}
    for part in (part for own in parts for part in own):
        of.setdefault((part.layer, part.matrix), {})[part.rank] = part.tensor
        cuts[part.layer] = part.cut

    def joined(layer: str, matrix: int) -> Tensor:
        found = of[layer, matrix]
        divided = cuts[layer] == 1 - matrix  # A by inputs, its dimension 1; B by outputs, its dimension 0
        return torch.cat([found[rank] for rank in sorted(found)], 1 - matrix) if divided else found[0]

    return {layer: (joined(layer, 0), joined(layer, 1)) for layer in cuts}


@dataclass(frozen=True)
class _Part:
    """What a rank has of one matrix of an adapter."""

    layer: str
    matrix: int
    """0: A, 1: B."""
    rank: int
    """Among those that divide the layer."""
    cut: int | None
    tensor: Tensor


def _own_parts(model: RankModel) -> list[_Part]:
    """What this rank alone has to tell of its adapters, on the CPU: of ranks that hold the same, one tells it."""
    place, parts = model.place, []
    for name, layer in adapted_layers(model).items():
        rank = Division.of(layer).rank if layer.cut is not None else place.tensor[0]
        if not (place.writes_experts if ".experts." in name else place.writes):
            continue
        for hf_layer, pair in layer.adapter.pairs().items():
            own = [(matrix, t) for matrix, t in enumerate(pair) if rank == 0 or layer.cut == 1 - matrix]
            parts += [_Part(hf_layer, matrix, rank, layer.cut, tensor.cpu()) for matrix, tensor in own]
    return parts


class MergedParameters(Mapping[str, Tensor]):
    """Parameters of a model as if it had no adapters but other weights; those with an adapter are made when asked for."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = {name: p.detach() for name, p in model.named_parameters() if not is_adapter(name)}
        self._adapters = adapters(model)

    def __getitem__(self, name: str) -> Tensor:
        parameter, adapter = self._parameters[name], self._adapters.get(name)
        return parameter if adapter is None else (parameter.float() + adapter.delta()).to(parameter.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def parameters_from(model: torch.nn.Module, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Parameters of the adapters of this rank, by name, from whole A and B by the name of the Hugging Face layer.

    Raises:
        ConfigError: a layer has none among them, or one of another shape.
    """
    out: dict[str, Tensor] = {}
    for name, layer in adapted_layers(model).items():
        division, adapter = Division.of(layer), layer.adapter
        for short, tensor in zip(adapter.adapted.short_names, adapter.adapted.names, strict=True):
            if tensor not in pairs:
                raise ConfigError(f"there is no adapter of {tensor}; lora.targets differ")
            for kind, whole, cut in (("lora_A", pairs[tensor][0], 1), ("lora_B", pairs[tensor][1], 0)):
                mine = whole.chunk(division.size, cut)[division.rank] if layer.cut == cut else whole
                wanted = getattr(adapter, kind)[short]
                if mine.shape != wanted.shape:
                    raise ConfigError(f"{kind} of {tensor} has shape {list(mine.shape)}, and {list(wanted.shape)} is wanted")
                out[f"{name}.adapter.{kind}.{short}"] = mine
    return out


def trained_names(model: torch.nn.Module) -> list[str]:
    """Names of the parameters that are trained."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]

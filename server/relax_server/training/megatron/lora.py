"""The adapters of a whole model: where they are put, what is trained with them, and what the model is with and without them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from relax_sdk.errors import ConfigError
from relax_sdk.tuning import TARGETS, TOWERS, LoraConfig, Tuning
from relax_server.training.megatron.adapted_weights import AdaptedWeight
from relax_server.training.megatron.adapter import ADAPTED, Adapter, Division, adapted_layers, is_adapter

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


def prepare(model: torch.nn.Module, adapted: Mapping[str, AdaptedWeight], tuning: Tuning, seed: int) -> None:
    """Put the adapters on a model that has its weights, and say of each of its parameters whether it is trained.

    Args:
        model: a `ForestModel`.
        adapted: by the name of a layer's weight, see `adapted_weights`.
        tuning: what is trained.
        seed: of the adapters.

    Raises:
        ConfigError: the model has none of the parts that are to have adapters, or no such tower.
    """
    if tuning.has_lora:
        found = {part for name, layer in [*model.named_modules()] if (part := _adapt(name, layer, adapted, tuning, seed))}
        _check_found(found, tuning.lora)
    for name, parameter in model.named_parameters():
        tower = name.partition(".")[0]
        whole = tuning.trains_whole(tower) if tower in TOWERS else not tuning.has_lora
        parameter.requires_grad_(whole or is_adapter(name))


def _adapt(name: str, layer: Any, adapted: Mapping[str, AdaptedWeight], tuning: Tuning, seed: int) -> str | None:
    """Put an adapter on a layer if it is to have one; returns the part of `TARGETS` that it belongs to then."""
    part, made = target_of(name), ADAPTED.get(type(layer))
    if part is None or made is None or not tuning.adapts(part):
        return None
    layer.__class__ = made
    layer.adapter = Adapter(layer.weight, adapted[f"{name}.weight"], tuning.lora, seed, layer.cut, Division.of(layer))
    if getattr(layer, "sequence_parallel", False) and not layer.explicit_expert_comm:
        layer.adapter.of_sequence_parallel(layer.cut)
    return part


def _check_found(found: set[str], lora: LoraConfig) -> None:
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

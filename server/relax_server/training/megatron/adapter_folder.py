"""A model's adapters out to files and back: what is published to engines, and what the KL reference had."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from relax_server.machine_limits import check_room, limits_told
from relax_server.models.adapter_files import ADAPTERS, Adapters, write_adapters
from relax_server.training.megatron import lora, parallel
from relax_server.training.megatron.adapter import is_adapter
from relax_server.training.megatron.build import Loaded
from relax_server.training.megatron.peft_folder import PEFT_FOLDER, read_pairs, trained_whole


def adapters_of(loaded: Loaded, base: str) -> Adapters:
    """All that is trained of a model.

    Args:
        loaded: a model with adapters.
        base: fingerprint of the folder that it was loaded from.
    """
    found = lora.adapters(loaded.model)
    pairs = {name: pair for adapter in found.values() for name, pair in adapter.pairs().items()}
    return Adapters(pairs, trained_whole(loaded), next(iter(found.values())).scale, base)


def publish(loaded: Loaded, base: str, folder: Path) -> None:
    """Write `adapters.safetensors`; one rank does, as adapters are whole on each.

    Raises:
        DiskFull: no room for it; nothing is written.
    """
    if not parallel.leads():
        return
    adapters = adapters_of(loaded, base)
    folder.mkdir(parents=True, exist_ok=True)
    check_room(folder, adapters.nbytes, ADAPTERS)
    with limits_told(f"{ADAPTERS} cannot be written", folder, writes=True):
        write_adapters(adapters, folder)


def reference_values(model: torch.nn.Module, folder: Path, load: Callable[[], torch.nn.Module]) -> Mapping[str, Tensor]:
    """Parameters that are trained, as they are in a model folder that this policy exported.

    Args:
        model: the policy's.
        folder: holds merged weights, and the adapters beside them if the policy has any.
        load: the folder's weights as such a model.

    Raises:
        ConfigError: not a folder of this model.
    """
    trained = lora.trained_names(model)
    values: dict[str, Tensor] = {}
    if any(is_adapter(name) for name in trained):
        values |= lora.parameters_from(model, read_pairs(folder / PEFT_FOLDER))
    if any(not is_adapter(name) for name in trained):
        other = dict(load().named_parameters())
        values |= {name: other[name].detach() for name in trained if not is_adapter(name)}
    return values

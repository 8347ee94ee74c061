"""A model's adapters out to files and back: what is published to engines, and what the KL reference had."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from relax_sdk.tuning import LoraConfig
from relax_server.machine_limits import check_room, limits_told
from relax_server.models.adapter_files import ADAPTERS, Adapters, write_adapters
from relax_server.training.megatron import lora, parallel
from relax_server.training.megatron.adapter import is_adapter
from relax_server.training.megatron.build import Loaded
from relax_server.training.megatron.peft_folder import PEFT_FOLDER, read_pairs, trained_whole


def publish(loaded: Loaded, settings: LoraConfig, base: str, folder: Path) -> None:
    """Write `adapters.safetensors`: all that is trained. Every rank calls it; rank 0, which has the towers, writes.

    Args:
        loaded: a model with adapters.
        settings: of its adapters.
        base: fingerprint of the folder that it was loaded from.
        folder: made where it is missing.

    Raises:
        DiskFull: no room for it; nothing is written.
    """
    pairs = lora.whole_pairs(loaded.model)
    with parallel.together():
        if parallel.leads():
            adapters = Adapters(pairs, trained_whole(loaded), settings.scale, base)
            folder.mkdir(parents=True, exist_ok=True)
            check_room(folder, adapters.nbytes, ADAPTERS)
            with limits_told(f"{ADAPTERS} cannot be written", folder, writes=True):
                write_adapters(adapters, folder)


def reference_values(model: torch.nn.Module, folder: Path, load: Callable[[], torch.nn.Module]) -> Mapping[str, Tensor]:
    """Parameters of this rank that are trained, as they are in a model folder that this policy exported. Every rank calls it.

    Args:
        model: the policy's.
        folder: holds merged weights, and the adapters beside them if the policy has any.
        load: the folder's weights as such a model.

    Raises:
        ConfigError: not a folder of this model.
    """
    trained = lora.trained_names(model)
    values: dict[str, Tensor] = {}
    with parallel.together():
        if any(is_adapter(name) for name in trained):
            values |= lora.parameters_from(model, read_pairs(folder / PEFT_FOLDER))
    if any(parallel.gather(any(not is_adapter(name) for name in trained))):  # all ranks load together
        other = dict(load().named_parameters())
        values |= {name: other[name].detach() for name in trained if not is_adapter(name)}
    return values

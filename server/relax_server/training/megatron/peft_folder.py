"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Layers have the names that they have in transformers, but for experts, which are one by one as in the model's folder: PEFT
stacks them as transformers stacks the experts' weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from relax_sdk.errors import ConfigError
from relax_sdk.tuning import TOWERS, LoraConfig
from relax_server.models.adapter_files import A, B
from relax_server.training.megatron import lora
from relax_server.training.megatron.build import Loaded

PEFT_FOLDER = "adapter"
"""Name of the folder inside that of the merged model."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT puts before the names of layers."""
IN_MEMORY = {"model.": "model.language_model.", "visual.": "model.visual.", "audio_tower.": "model.audio_tower."}
"""Prefixes of an omni model's layers in its folder, and in transformers."""

Pairs = Mapping[str, tuple[Tensor, Tensor]]


def peft_writer(loaded: Loaded, settings: LoraConfig, source: Path) -> Callable[[Path], None]:
    """What writes the adapters of a model into the folder `adapter` of a folder; rank 0 calls that, and every rank this.

    Args:
        loaded: a model with adapters.
        settings: of its adapters.
        source: the folder of its base.
    """
    pairs = lora.whole_pairs(loaded.model)

    def write(folder: Path) -> None:
        whole = trained_whole(loaded)
        layers = [name.removesuffix(".weight") for name in loaded.whole]
        has_towers = loaded.model.family.media is not None
        config = peft_config(settings, [*pairs], layers, str(source), has_towers)
        config["modules_to_save"] = [tower for tower in TOWERS if any(name.startswith(f"{tower}.") for name in whole)] or None
        write_peft(folder / PEFT_FOLDER, pairs, whole, config, has_towers)

    return write


def trained_whole(loaded: Loaded) -> dict[str, Tensor]:
    """Tensors of a model with adapters that are trained themselves, by their names in the model's folder: of towers, which the
    ranks of the first stage have whole."""
    trained = {name: p.detach() for name, p in loaded.model.named_parameters() if p.requires_grad}
    return {
        name: tensor
        for link in loaded.links
        if trained.keys() >= {*link.megatron} and not link.is_copy
        for name, tensor in zip(link.hf, link.split([trained[n] for n in link.megatron]), strict=True)
    }


def write_peft(folder: Path, pairs: Pairs, whole: Mapping[str, Tensor], config: Mapping[str, Any], has_towers: bool) -> None:
    """Write both files into a new folder; `pairs` and `whole` by the names in the model's folder."""
    folder.mkdir()
    tensors = {PREFIX + _in_memory(name): tensor.contiguous().cpu() for name, tensor in whole.items()}
    for layer, (a, b) in pairs.items():
        name = PREFIX + (_in_memory(layer) if has_towers else layer)
        tensors[name + A], tensors[name + B] = a.contiguous().cpu(), b.contiguous().cpu()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=1))


def peft_config(
    settings: LoraConfig, adapted: Sequence[str], layers: Sequence[str], base: str, has_towers: bool
) -> dict[str, Any]:
    """The contents of `adapter_config.json`.

    Args:
        settings: rank and alpha.
        adapted: layers with an adapter.
        layers: all layers of the model, whatever they are.
        base: name or folder of the base model.
        has_towers: whether it is an omni model.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
        "target_modules": _target_modules(adapted, layers, has_towers),
    }


def _target_modules(adapted: Sequence[str], layers: Sequence[str], has_towers: bool) -> list[str]:
    """Last words of the layers' names where these say which layers are meant, and else the names in transformers."""
    words = {name.rpartition(".")[2] for name in adapted}
    if {*adapted} >= {name for name in layers if name.rpartition(".")[2] in words}:
        return sorted(words)
    experts = {name.rpartition(".")[2] for name in adapted if ".experts." in name}
    others = [name for name in adapted if ".experts." not in name]
    return sorted([*experts, *(_in_memory(name) if has_towers else name for name in others)])


def _in_memory(layer: str) -> str:
    layer = layer.removeprefix("thinker.")  # in the folder of a whole model; adapters are for its thinker
    if layer.startswith(tuple(IN_MEMORY.values())):
        return layer
    prefix = next((short for short in IN_MEMORY if layer.startswith(short)), "")
    return IN_MEMORY.get(prefix, "") + layer.removeprefix(prefix)


def _in_folder(layer: str) -> str:
    short, full = next(((s, f) for s, f in IN_MEMORY.items() if layer.startswith(f)), ("", ""))
    return short + layer.removeprefix(full)


def read_pairs(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each layer, by its name in the model's folder.

    Raises:
        ConfigError: the folder does not hold what `write_peft` writes.
    """
    try:
        tensors = load_file(folder / WEIGHTS)
        names = [name.removesuffix(A) for name in tensors if name.endswith(A)]
        return {_in_folder(name.removeprefix(PREFIX)): (tensors[name + A], tensors[name + B]) for name in names}
    except (SafetensorError, OSError, KeyError) as error:
        raise ConfigError(f"{folder}: no adapters in PEFT's format ({error!r})") from error

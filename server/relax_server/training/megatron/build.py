"""A model folder as a Megatron model with its weights, and back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from relax_server.models.weight_files import read_weights
from relax_server.training.megatron import hf
from relax_server.training.megatron.config import OMNI_TYPE, transformer_config
from relax_server.training.megatron.forest_model import ForestModel
from relax_server.training.megatron.omni import OmniModel


@dataclass(frozen=True)
class Loaded:
    """A model and the names its folder uses."""

    model: ForestModel
    hf_config: Any
    links: list[hf.Link]

    def hf_weights(self) -> dict[str, torch.Tensor]:
        """The parameters under Hugging Face names, as the model's folder spells them."""
        return hf.to_hf(self.links, {name: p.detach() for name, p in self.model.named_parameters()})


def build_model(hf_config: Any, *, dtype: torch.dtype, device: torch.device, recompute: bool) -> ForestModel:
    """Build a model with random weights.

    Raises:
        ConfigError: the model cannot be trained.
    """
    config = transformer_config(hf_config, dtype=dtype, recompute=recompute)
    kind = OmniModel if hf_config.model_type == OMNI_TYPE else ForestModel
    model = kind(config, hf_config, device).to(device)
    for parameter in model.parameters():  # not `model.to(dtype)`: position buffers stay float32, as in `from_pretrained`
        parameter.data = parameter.data.to(dtype)
    return model


def load_model(
    path: Path,
    hf_config: Any,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    recompute: bool = False,
) -> Loaded:
    """Build a model and fill it from its folder.

    Raises:
        ConfigError: the model cannot be trained, or its weights do not fit its configuration.
    """
    device = device or torch.device("cpu")
    model = build_model(hf_config, dtype=dtype, device=device, recompute=recompute)
    weights = read_weights(path)
    names = [name for name, _ in model.named_parameters()]
    links = hf.model_links(hf_config, hf.TensorNames.of(weights, str(path)), names)
    load_weights(model, links, weights, str(path))
    return Loaded(model, hf_config, links)


def load_weights(model: ForestModel, links: list[hf.Link], weights: dict[str, torch.Tensor], source: str) -> None:
    """Copy Hugging Face weights into a model.

    Raises:
        ConfigError: names or shapes do not fit.
    """
    from relax_sdk.errors import ConfigError

    ours = hf.to_megatron(links, weights, source)
    parameters = dict(model.named_parameters())
    missing = sorted(set(parameters) - set(ours))
    wrong = [f"{n} {list(t.shape)}" for n, t in ours.items() if n in parameters and parameters[n].shape != t.shape]
    if missing or wrong or set(ours) - set(parameters):
        raise ConfigError(f"{source}: no weights for {missing[:4]}; wrong shapes {wrong[:4]}")
    with torch.no_grad():
        for name, tensor in ours.items():
            parameters[name].copy_(tensor)

"""A model folder as a Megatron model with its weights, and back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from relax_sdk.config import Attention
from relax_sdk.errors import ConfigError
from relax_server.models.families import family_of, trained_part
from relax_server.models.weight_files import FolderWeights
from relax_server.training.megatron import flex, hf, parallel
from relax_server.training.megatron.config import head_dim, text_config, transformer_config
from relax_server.training.megatron.forest_model import ForestModel
from relax_server.training.megatron.omni import OmniModel


@dataclass(frozen=True)
class Loaded:
    """A model and the names its folder uses."""

    model: ForestModel
    hf_config: Any
    links: list[hf.Link]
    source: FolderWeights
    """Weights of the folder that it was loaded from."""

    def folder_weights(self) -> hf.WithUntrained:
        """All that belongs into a folder like the model's own: what was trained, and other parts as they are there."""
        return hf.WithUntrained(self.hf_weights(), self.source)

    def hf_weights(self) -> hf.HfWeights:
        """The parameters under Hugging Face names, as the model's folder spells them."""
        return hf.HfWeights(self.links, {name: p.detach() for name, p in self.model.named_parameters()})


def build_model(
    hf_config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    recompute: bool,
    attention: Attention = "auto",
) -> ForestModel:
    """Build a model with random weights.

    Raises:
        ConfigError: the model cannot be trained.
    """
    config = transformer_config(hf_config, dtype=dtype, recompute=recompute)
    kind = ForestModel if family_of(hf_config.model_type).media is None else OmniModel
    model = kind(config, hf_config, device).to(device)
    model.flex = flex.way(attention, device, head_dim(text_config(hf_config))) == "flex"
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
    attention: Attention = "auto",
) -> Loaded:
    """Build a model and fill it from its folder.

    Raises:
        ConfigError: the model cannot be trained, or its weights do not fit its configuration.
    """
    device = device or torch.device("cpu")
    hf_config = trained_part(hf_config)
    model = build_model(hf_config, dtype=dtype, device=device, recompute=recompute, attention=attention)
    weights = FolderWeights(path)
    names = [name for name, _ in model.named_parameters()]
    links = hf.model_links(hf_config, hf.TensorNames.of(weights.shapes, str(path), model.family), names)
    load_weights(model, links, weights)
    return Loaded(model, hf_config, links, weights)


def load_weights(model: ForestModel, links: list[hf.Link], weights: FolderWeights) -> None:
    """Copy the weights of a folder into a model, those of one link at a time; a tensor-parallel rank reads its part alone.

    Raises:
        ConfigError: names, shapes or dtypes do not fit.
    """
    parameters = dict(model.named_parameters())
    part = parallel.tensor_parallel()
    hf.check_weights(links, weights, parameters, part)
    unfilled = sorted(set(parameters) - {name for link in links for name in link.megatron})
    if unfilled:
        raise ConfigError(f"{weights.folder}: no weights for {unfilled[:4]}; this kind of model cannot be trained")
    with torch.no_grad():
        for link in links:
            for name, tensor in zip(link.megatron, link.read(weights, part), strict=True):
                parameters[name].copy_(tensor)

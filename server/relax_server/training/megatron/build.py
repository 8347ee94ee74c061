"""A model folder as a Megatron model with its weights, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor
from transformers.initialization import no_init_weights

from relax_sdk.errors import ConfigError
from relax_sdk.training_config import Attention, Experts, Recompute
from relax_sdk.tuning import Tuning
from relax_server.models.families import family_of, trained_part
from relax_server.models.weight_files import FolderWeights
from relax_server.training.attention_way import attention_way
from relax_server.training.megatron import hf, lora, parallel
from relax_server.training.megatron.adapted_weights import adapted_weights
from relax_server.training.megatron.config import head_dim, text_config, transformer_config
from relax_server.training.megatron.experts import RankExperts, way
from relax_server.training.megatron.forest_model import ForestModel
from relax_server.training.megatron.hf_weights import HfWeights, WithUntrained, check_weights
from relax_server.training.megatron.interleaved import InterleavedModel, RankModel
from relax_server.training.megatron.link import Link
from relax_server.training.megatron.omni import OmniModel

DIVIDED = {VocabParallelEmbedding: 0, ColumnParallelLinear: 0, RowParallelLinear: 1}
"""Megatron's divided layers, and the dimension that their weight is divided in."""


@dataclass(frozen=True)
class Loaded:
    """This rank's part of a model, and the names that the model's folder uses."""

    model: RankModel
    hf_config: Any
    links: list[Link]
    whole: Mapping[str, Tensor]
    """All tensors of the model, of all ranks, by the names of its folder, on the meta device."""
    source: FolderWeights
    """Weights of the folder that it was loaded from."""

    def folder_weights(self) -> WithUntrained:
        """All that belongs into a folder like the model's own: what was trained, and other parts as they are there."""
        return WithUntrained(self.hf_weights(), self.source)

    def hf_weights(self) -> HfWeights:
        """The parameters under Hugging Face names, as the model's folder spells them; adapters are merged into them."""
        return HfWeights(self.links, lora.MergedParameters(self.model), self.model.place, self.whole)


def build_model(
    hf_config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    recompute: Recompute,
    attention: Attention = "auto",
    experts: Experts = "auto",
) -> RankModel:
    """Build this rank's part of a model on its device; its weights are whatever the memory held, for a folder to fill.

    Raises:
        ConfigError: the model cannot be trained, or not in this layout.
    """
    layout = parallel.layout()
    config = transformer_config(hf_config, dtype=dtype, recompute=recompute, layout=layout)
    kind = ForestModel if family_of(hf_config.model_type).media is None else OmniModel
    with device, no_init_weights():
        parts = [kind(config, hf_config, device, number).to(device) for number in range(layout.vpp)]
    model = InterleavedModel(parts) if len(parts) > 1 else parts[0]
    _mark_divided(model)
    if config.context_parallel_size > 1:  # a rank has some of the queries, which blocks alone can do
        if attention == "flex":
            raise ConfigError("training.attention = 'flex' cannot be had with layout.cp above 1; set it to 'auto' or 'blocks'")
    else:
        channels, on_gpu = head_dim(text_config(hf_config)), device.type == "cuda"
        chosen = attention_way(attention, on_gpu=on_gpu, head_dim=channels, dtype=str(dtype).removeprefix("torch."))
        for part in parts:
            part.flex = chosen == "flex"
    if config.num_moe_experts:
        widths = (config.hidden_size, config.moe_ffn_hidden_size // config.expert_tensor_parallel_size)
        grouped = way(experts, device, dtype, widths) == "grouped"
        for module in model.modules():
            if isinstance(module, RankExperts):
                module.grouped = grouped
    for parameter in model.parameters():  # not `model.to(dtype)`: position buffers stay float32, as in `from_pretrained`
        parameter.data = parameter.data.to(dtype)
    return model


def _mark_divided(model: RankModel) -> None:
    """Mark weights that tensor parallelism divides. Megatron does so only where it draws them, and norms count others once."""
    for module in model.modules():
        dim = next((dim for kind, dim in DIVIDED.items() if isinstance(module, kind)), None)
        if dim is not None and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, True, dim, 1)


def load_model(
    path: Path,
    hf_config: Any,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    recompute: Recompute = False,
    attention: Attention = "auto",
    experts: Experts = "auto",
    tuning: Tuning | None = None,
    seed: int = 0,
) -> Loaded:
    """Build this rank's part of a model, fill it from its folder, and prepare it for training; every rank calls it.

    Args:
        path: the folder.
        hf_config: its configuration.
        dtype: of the parameters.
        device: where they live.
        recompute: what is computed again for the backward pass, see `TrainingConfig.recompute`.
        attention: which way attention is computed.
        experts: which way experts are computed.
        tuning: what is trained; None: everything.
        seed: of adapters.

    Raises:
        ConfigError: the model cannot be trained, or its weights do not fit its configuration.
    """
    device, tuning = device or torch.device("cpu"), tuning or Tuning()
    hf_config = trained_part(hf_config)
    with parallel.together():
        model = build_model(hf_config, dtype=dtype, device=device, recompute=recompute, attention=attention, experts=experts)
        weights = FolderWeights(path)
        links = _links(model, hf_config, hf.TensorNames.of(weights.shapes, str(path), model.family))
    whole = whole_model(model, links)
    with parallel.together():
        load_weights(model, links, weights, whole)
        found = lora.prepare(model, adapted_weights(links, model.place), tuning, seed)
    if tuning.has_lora:
        everywhere = parallel.gather(found)
        with parallel.together():
            lora.check_found(set().union(*everywhere), tuning.lora)
    return Loaded(model, hf_config, links, whole, weights)


def _links(model: RankModel, hf_config: Any, named: hf.TensorNames) -> list[Link]:
    """Every parameter that a rank has."""
    links: list[Link] = []
    for prefix, part in model.named_parts():
        parameters = [name for name, _ in part.named_parameters()]
        links += hf.model_links(hf_config, named, parameters, part.place, prefix)
    return links


def whole_model(model: RankModel, links: list[Link]) -> dict[str, Tensor]:
    """All tensors of a model, of all ranks, by their Hugging Face names, on the meta device; every rank calls it."""
    parameters, place = dict(model.named_parameters()), model.place
    own = {name: tensor for link in links for name, tensor in link.whole(parameters, place).items()}
    shapes = parallel.gather({name: (list(tensor.shape), tensor.dtype) for name, tensor in own.items()})
    return {name: torch.empty(shape, dtype=dtype, device="meta") for part in shapes for name, (shape, dtype) in part.items()}


def load_weights(model: RankModel, links: list[Link], weights: FolderWeights, whole: Mapping[str, Tensor]) -> None:
    """Copy the weights of a folder into a model, those of one link at a time; a rank reads its part alone.

    Args:
        model: of this rank.
        links: of its part.
        weights: of the folder.
        whole: all tensors of the model, as `whole_model` returns them.

    Raises:
        ConfigError: names, shapes or dtypes do not fit.
    """
    parameters = dict(model.named_parameters())
    check_weights(whole, weights)
    unfilled = sorted(set(parameters) - {name for link in links for name in link.megatron})
    if unfilled:
        raise ConfigError(f"{weights.folder}: no weights for {unfilled[:4]}; this kind of model cannot be trained")
    with torch.no_grad():
        for link in links:
            for name, tensor in zip(link.megatron, link.read(weights, model.place), strict=True):
                parameters[name].copy_(tensor)

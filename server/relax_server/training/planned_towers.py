"""What a model's towers keep for their backward pass for each media token: measured on towers of its widths with a small input.

The layers of a tower are alike, so all of them share the weights of the first: a tower that is measured has the weights of one
layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from relax_sdk.config import TrainingConfig
from relax_sdk.errors import ConfigError
from relax_sdk.planning import PlanRequest
from relax_sdk.tuning import Tuning
from relax_server.models.families import MediaRule, Tower
from relax_server.models.media_item import MediaFeatures
from relax_server.models.towers import recompute_layers
from relax_server.training.planned_model import Model

MEDIA_TOKENS = {"visual_tokens": "visual", "audio_tokens": "audio_tower"}
"""Towers by the field of `PlanRequest` that says how many tokens of their media a forest has."""
PICTURE_SIDE = 4
"""Tokens along a side of the picture that is shown; the bytes of a token do not depend on their number."""
SOUND_CHUNKS = 2
"""Parts of a sound that the tower computes one by one."""


def tower_bytes_per_token(model: Model, training: TrainingConfig, tuning: Tuning) -> dict[str, float]:
    """Bytes that each tower keeps for its backward pass for each token of its media; 0: it is frozen, so there is none.

    An audio tower pads the last chunk of a sound that is longer than one, see `media_tokens`.

    Args:
        model: what is trained; a model of texts has no towers.
        training: precision, recomputation.
        tuning: which towers are trained or have adapters.
    """
    rule = model.family.media
    if rule is None:
        return {}
    return {name: _of_tower(model, rule, name, training, tuning) for name in rule.towers}


def kept_of_media(request: PlanRequest, per_token: Mapping[str, float]) -> int:
    """Bytes that the towers keep for the media of one forest.

    Args:
        request: says how many tokens of media a forest has.
        per_token: bytes of a token, by tower.

    Raises:
        ConfigError: the model has no such tower, or there are more tokens of images and films than a forest has tokens.
    """
    told = {tower: getattr(request, name) for name, tower in MEDIA_TOKENS.items()}
    lacking = [name for name, tower in MEDIA_TOKENS.items() if told[tower] and tower not in per_token]
    if lacking:
        raise ConfigError(f"{lacking[0]} = {told[MEDIA_TOKENS[lacking[0]]]}: the model has no tower for such media")
    if request.visual_tokens > request.training.token_budget:  # sounds may have more, as their last chunks count as full ones
        raise ConfigError(
            f"visual_tokens = {request.visual_tokens} is more than the {request.training.token_budget} tokens of a forest "
            "(training.token_budget)"
        )
    return kept_of(told, per_token)


def kept_of(tokens: Mapping[str, float], per_token: Mapping[str, float]) -> int:
    """Bytes that the towers keep for media with so many tokens.

    Args:
        tokens: by tower.
        per_token: bytes by tower; one that is not in it keeps nothing.
    """
    return round(sum(tokens[tower] * size for tower, size in per_token.items()))


def media_tokens(media: Iterable[MediaFeatures], chunk: int) -> dict[str, int]:
    """Tokens of different media by tower, as a plan counts them: a sound that is longer than a chunk has whole chunks.

    Args:
        media: items; the sound of a film counts as a sound.
        chunk: see `chunk_tokens`.
    """
    found = {"visual": 0, "audio_tower": 0}
    for item in media:
        found["visual"] += item.n_visual
        heard = item.heard.n_tokens if item.heard is not None else 0
        found["audio_tower"] += heard + (-heard % chunk if heard > chunk else 0)
    return found


def chunk_tokens(model: Model) -> int:
    """Tokens of a full chunk of the audio tower; 0: the model hears nothing."""
    rule = model.family.media
    if rule is None or rule.audio_tokens is None:
        return 0
    return rule.audio_tokens(2 * model.whole.audio_config.n_window)


def _of_tower(model: Model, rule: MediaRule, name: str, training: TrainingConfig, tuning: Tuning) -> float:
    adapted, whole = tuning.adapts(name), tuning.trains_whole(name)
    if not (adapted or whole):
        return 0.0
    dtype = getattr(torch, training.dtype)
    tower = _measured_tower(rule.towers[name], model.whole, dtype)
    linear = [module for module in tower.modules() if isinstance(module, nn.Linear)]
    if not whole:  # an adapter needs the input of its layer, as the layer's weight would
        tower.requires_grad_(False)
        for layer in linear:
            layer.weight.requires_grad_(True)
    if training.recompute is True:
        recompute_layers(tower)
    show = _with_sound if name == "audio_tower" else _with_picture
    forward, tokens = show(tower, rule, model.whole, dtype)
    rows = 0

    def count(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal rows
        rows += inputs[0].numel() // inputs[0].shape[-1]

    for layer in linear:
        layer.register_forward_pre_hook(count)
    kept = kept_bytes(tower, forward)
    if adapted and training.recompute is not True:
        kept += rows * tuning.lora.rank * dtype.itemsize  # A x of every linear layer
    return kept / tokens


def _measured_tower(tower: Tower, config: Any, dtype: torch.dtype) -> nn.Module:
    """A tower whose parameters are zeros, and whose equal layers are one."""
    with torch.device("meta"), no_init_weights():
        built = tower.build(config)
    for layers in [module for module in built.modules() if isinstance(module, nn.ModuleList)]:
        if len({_kind(layer) for layer in layers}) == 1:
            for place in range(1, len(layers)):
                layers[place] = layers[0]
    for parameter in built.parameters():
        parameter.data = parameter.data.to(dtype)
    built.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*built.parameters(), *built.buffers()):
            tensor.zero_()
    return built


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Equal for layers that differ in the values of their parameters alone."""
    return type(layer), tuple((name, parameter.shape) for name, parameter in layer.named_parameters())


def _with_picture(tower: nn.Module, rule: MediaRule, config: Any, dtype: torch.dtype) -> tuple[Callable[[], Any], int]:
    """A forward pass of a tower with a picture, and the number of the picture's tokens."""
    side = PICTURE_SIDE * config.vision_config.spatial_merge_size
    width = math.prod(tower.get_parameter(rule.visual.first).shape[1:])
    patches, grid = torch.zeros(side * side, width, dtype=dtype), torch.tensor([[1, side, side]])
    return lambda: tower(patches, grid_thw=grid), PICTURE_SIDE**2


def _with_sound(tower: nn.Module, rule: MediaRule, config: Any, dtype: torch.dtype) -> tuple[Callable[[], Any], int]:
    """A forward pass of a tower with a sound, and the number of the sound's tokens."""
    assert rule.audio_tokens is not None
    audio = config.audio_config
    n_frames = SOUND_CHUNKS * 2 * audio.n_window
    frames, lengths = torch.zeros(audio.num_mel_bins, n_frames, dtype=dtype), torch.tensor([n_frames])
    return lambda: tower(frames, feature_lens=lengths), rule.audio_tokens(n_frames)


def kept_bytes(model: nn.Module, forward: Callable[[], Any]) -> int:
    """Bytes that a forward pass keeps for the backward pass, each storage once; parameters and buffers are not among them.

    Args:
        model: what is computed.
        forward: computes it.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}
    tensors: list[Tensor] = []  # or storages are freed, and their addresses used again

    def note(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # one that knows its graph would be held by it: a circle that no collector sees
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
            tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    return sum(kept.values())

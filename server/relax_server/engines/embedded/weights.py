"""Weights of a Hugging Face folder into a model that is already loaded, in place: what a weight update does."""

from __future__ import annotations

import re

import torch

from relax_sdk.errors import ConfigError

_OMNI_PREFIXES = (("model.", "model.language_model."), ("visual.", "model.visual."), ("audio_tower.", "model.audio_tower."))
_THINKER = "thinker."
_EXPERTS = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def assign(
    model: torch.nn.Module, tensors: dict[str, torch.Tensor], whole: bool = True
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Find the place of every tensor; nothing is changed yet.

    Args:
        model: of any family of `models.families`, as transformers builds it (experts fused).
        tensors: by the names `save_pretrained` writes (one matrix per expert) or by the model's own.
        whole: whether every parameter must have its tensor.

    Returns:
        Pairs of (view into a parameter, new value); copying them completes the update.

    Raises:
        ConfigError: a parameter has no tensor, a tensor has no parameter, or shapes differ; the message names them.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    omni = any(name.startswith("model.language_model.") for name in parameters)
    tied = _tied(model, parameters)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    covered: dict[str, int] = dict.fromkeys(parameters, 0)
    unknown: list[str] = []
    has_others = any(name.startswith(_THINKER) for name in tensors)
    for name, tensor in tensors.items():
        if has_others and not name.startswith(_THINKER):
            continue  # of another part of the model, such as the talker
        target, view = _place(name, parameters, omni)
        if target is None or view is None:
            unknown.append(name)
            continue
        if _EXPERTS.fullmatch(name) and view.shape != tensor.shape == view.mT.shape:
            view = view.mT  # published folders of Qwen3-VL-MoE stack experts as [experts, inputs, outputs]
        if view.shape != tensor.shape:
            raise ConfigError(f"weight {name}: shape {list(tensor.shape)}, but the model has {list(view.shape)}")
        covered[target] += view.numel()
        pairs.append((view, tensor))
    lacking = [n for n, seen in covered.items() if seen != parameters[n].numel() and not (n in tied and covered[tied[n]])]
    missing = lacking if whole else []
    if unknown or missing:
        raise ConfigError(
            f"the weights do not fit the model: {len(missing)} parameters without a value {missing[:4]}, "
            f"{len(unknown)} unknown names {unknown[:4]}"
        )
    return pairs


def _tied(model: torch.nn.Module, parameters: dict[str, torch.nn.Parameter]) -> dict[str, str]:
    """Parameters that share memory with another, by name."""
    first: dict[int, str] = {}
    out: dict[str, str] = {}
    for name, parameter in parameters.items():
        other = first.setdefault(id(parameter), name)
        if other != name:
            out[name], out[other] = other, name
    return out


def _place(name: str, parameters: dict[str, torch.nn.Parameter], omni: bool) -> tuple[str, torch.Tensor] | tuple[None, None]:
    name = name.removeprefix(_THINKER)
    if omni and name not in parameters:
        for short, full in _OMNI_PREFIXES:
            if name.startswith(short):
                name = full + name.removeprefix(short)
                break
    if name in parameters:
        return name, parameters[name].data
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None, None
    target = f"{match[1]}.{'down_proj' if match[3] == 'down' else 'gate_up_proj'}"
    if target not in parameters or int(match[2]) >= len(parameters[target]):
        return None, None
    expert = parameters[target].data[int(match[2])]
    if match[3] == "down":
        return target, expert
    gate, up = expert.chunk(2)
    return target, gate if match[3] == "gate" else up


@torch.no_grad()
def copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write the new values, converting to the model's dtype."""
    for view, tensor in pairs:
        view.copy_(tensor)

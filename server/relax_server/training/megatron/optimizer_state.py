"""The optimizer in a checkpoint, in a form that every layout reads.

Megatron-Core 0.16.1 has three habits that stand in the way with torch's AdamW: the divided optimizer knows no step count of a
parameter, gives all parameters one and the same tensor for it after loading, and there are two optimizers where experts are
divided and one where they are not. Each is answered here.
"""

from __future__ import annotations

from typing import Any

import torch

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
"""How Megatron is to lay out the state: by parameters of the whole model, under the same names in every layout."""


def sharded_state(optimizer: Any, model: Any, *, loading: bool) -> Any:
    """The optimizer as Megatron shards it.

    AdamW makes its moments and step counts at its first step; here they are made if it has not, with the same numbers.

    Args:
        optimizer: Megatron's.
        model: the model as Megatron shards it.
        loading: the shards are to be filled.
    """
    for chained in optimizer.chained_optimizers:
        if chained.optimizer is None:  # a rank without parameters of its kind
            continue
        _keep_steps(type(chained))
        chained.init_state_fn(chained.optimizer, chained.config)
        for parameter, state in chained.optimizer.state.items():
            state.setdefault("step", torch.zeros((), device=parameter.device))
    return optimizer.sharded_state_dict(model, is_loading=loading, metadata=METADATA)


def load(optimizer: Any, state: dict[Any, Any]) -> None:
    """Take what was read into the shards of `sharded_state`."""
    optimizer.load_state_dict(_regrouped(optimizer, state))
    for chained in optimizer.chained_optimizers:
        if chained.optimizer is None:
            continue
        for own in chained.optimizer.state.values():
            own["step"] = own["step"].clone()  # of this parameter alone, as every parameter counts it on


def _keep_steps(kind: Any) -> None:
    """Let the divided optimizer keep AdamW's step count of a parameter when it takes the parameter's moments."""
    original = getattr(kind, "_set_main_param_and_optimizer_states", None)
    if original is None or hasattr(original, "keeps_steps"):
        return

    def keeping(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[parameter]
        kept = self.optimizer.state.get(self.optimizer.param_groups[group]["params"][order], {})
        original(self, parameter, ({"step": kept["step"]} if "step" in kept else {}) | tensors)

    keeping.keeps_steps = True  # type: ignore[attr-defined]
    kind._set_main_param_and_optimizer_states = keeping


def _inner(part: dict[Any, Any]) -> dict[Any, Any]:
    """The state of torch's optimizer inside that of one of Megatron's."""
    return part.get("optimizer", part)


def _regrouped(optimizer: Any, state: dict[Any, Any]) -> dict[Any, Any]:
    """Fit what stands around the tensors to as many optimizers as there are here."""
    parts = optimizer.chained_optimizers
    here = [state[i] for i in range(len(parts))] if len(parts) > 1 else [state]
    saved = [part for key, part in state.items() if isinstance(key, int) and _is_written(part)] or [state]
    for part in (*here, *saved):
        if "state" in _inner(part):
            _inner(part)["state"].setdefault("common_step", torch.zeros(()))  # Megatron does not write a count of zero
    if len(saved) == len(parts):
        return state
    source = _inner(saved[0])
    for chained, part in zip(parts, here, strict=True):
        inner = part.setdefault("optimizer", {}) if "param_state" in part else _inner(part)
        inner["param_groups"] = [dict(group) for group in _inner(chained.state_dict())["param_groups"]]
        for group in inner["param_groups"]:
            if "step" in source["param_groups"][0]:  # of the divided optimizer
                group["step"] = source["param_groups"][0]["step"]
        if "state" in inner:
            inner["state"]["common_step"] = source.get("state", {}).get("common_step", torch.zeros(()))
        elif "param_state" in part:
            part["param_state_sharding_type"] = saved[0]["param_state_sharding_type"]
    return dict(enumerate(here)) if len(parts) > 1 else state


def _is_written(part: Any) -> bool:
    """Whether a part of the state is one that was saved, and not only shards that were filled."""
    groups = _inner(part).get("param_groups") if isinstance(part, dict) else None
    return bool(groups) and "lr" in groups[0]

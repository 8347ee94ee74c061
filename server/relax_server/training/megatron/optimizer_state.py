"""The optimizer in a checkpoint, in a form that every layout reads.

The tensors are those of whole parameters, under the same names whether the optimizer is divided or not: AdamW's two moments,
and the float32 master where the weights are of another type. What Megatron writes around them differs from layout to layout;
of that only the number of steps is read.

Megatron-Core 0.16.1 has two habits that stand in the way with torch's AdamW: the divided optimizer knows no step count of a
parameter, and gives all parameters one and the same tensor for it after loading. Both are answered here.
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


STATE = "optimizer.state."
"""What the names of the optimizer's tensors begin with, in a checkpoint."""
MASTERS = "fp32_param"
"""Name of the masters in a checkpoint."""
OLD_MASTERS = "param"
"""Their name in checkpoints of a divided optimizer of format 3 and before."""


def sharded_state(optimizer: Any, model: Any, *, loading: bool, masters: str = MASTERS) -> Any:
    """The optimizer as Megatron shards it.

    AdamW makes its moments and step counts at its first step; here they are made if it has not, with the same numbers.

    Args:
        optimizer: Megatron's.
        model: the model as Megatron shards it.
        loading: the shards are to be filled.
        masters: their name in the checkpoint.
    """
    for chained in optimizer.chained_optimizers:
        if chained.optimizer is None:  # a rank without parameters of its kind
            continue
        _patch(type(chained))
        chained.init_state_fn(chained.optimizer, chained.config)
        for parameter, state in chained.optimizer.state.items():
            state.setdefault("step", torch.zeros((), device=parameter.device))
    state = optimizer.sharded_state_dict(model, is_loading=loading, metadata=METADATA)
    for chained, part in zip(optimizer.chained_optimizers, _parts(optimizer, state), strict=True):
        for master in _masters(part, chained.config.bf16):
            _, _, parameter = master.key.removeprefix(STATE).partition(".")
            master.key = f"{STATE}{masters}.{parameter}"
    return state


def load(optimizer: Any, state: dict[Any, Any]) -> None:
    """Take what was read into the shards of `sharded_state`."""
    steps, parts = _steps_taken(state), _parts(optimizer, state)
    fitted = [_fitted(chained, part, steps) for chained, part in zip(optimizer.chained_optimizers, parts, strict=True)]
    optimizer.load_state_dict(dict(enumerate(fitted)) if len(fitted) > 1 else fitted[0])
    for chained in optimizer.chained_optimizers:
        if chained.optimizer is None:
            continue
        for own in chained.optimizer.state.values():
            own["step"] = own["step"].clone()  # of this parameter alone, as every parameter counts it on


def _patch(kind: Any) -> None:
    """Let the divided optimizer keep what is not given with a parameter: its step count, and a master that is the weight."""
    original = getattr(kind, "_set_main_param_and_optimizer_states", None)
    if original is None or hasattr(original, "keeps"):
        return

    def keeping(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[parameter]
        main = self.optimizer.param_groups[group]["params"][order]
        kept = {"param": main} | self.optimizer.state.get(main, {})
        original(self, parameter, {name: kept[name] for name in ("param", "step") if name in kept} | tensors)

    keeping.keeps = True  # type: ignore[attr-defined]
    kind._set_main_param_and_optimizer_states = keeping


def _masters(part: dict[Any, Any], kept: bool) -> list[Any]:
    """Shards of the masters of one optimizer, divided or not.

    Args:
        part: its state as Megatron shards it; changed.
        kept: False where a master is the weight itself, which the checkpoint holds with the model; it is left out here.
    """
    divided = [tensors.pop("param") if not kept else tensors["param"] for tensors in part.get("param_state", {}).values()]
    return divided + [shard for group in part.get("fp32_from_fp16_params", ()) for shard in group] if kept else []


def _parts(optimizer: Any, state: dict[Any, Any]) -> list[dict[Any, Any]]:
    """The state of each optimizer: there are two where experts are divided, and one where they are not."""
    count = len(optimizer.chained_optimizers)
    return [state[i] for i in range(count)] if count > 1 else [state]


def _inner(part: dict[Any, Any]) -> dict[Any, Any]:
    """The state of torch's optimizer inside that of one of Megatron's."""
    return part.get("optimizer", part)


def _steps_taken(state: dict[Any, Any]) -> float:
    """The number of steps that AdamW had done when the state was written, in any layout."""
    written = next((part for key, part in state.items() if isinstance(key, int) and _is_written(part)), state)
    inner = _inner(written)
    divided = inner["param_groups"][0].get("step")
    return float(inner.get("state", {}).get("common_step", 0.0) if divided is None else divided)


def _fitted(chained: Any, part: dict[Any, Any], steps: float) -> dict[Any, Any]:
    """The state of one optimizer: tensors as they were read, and around them what is there now.

    Args:
        chained: the optimizer.
        part: what was read for it.
        steps: that it has done.
    """
    if chained.optimizer is None:
        return part
    own = chained.state_dict()
    if "param_state" in part:
        for group in own["optimizer"]["param_groups"]:
            group["step"] = steps
        return own | {"param_state": part["param_state"], "param_state_sharding_type": METADATA["distrib_optim_sharding_type"]}
    if "fp32_from_fp16_params" in own:
        read = iter(part.get("fp32_from_fp16_params", ()))  # Megatron leaves groups out of which this rank has nothing
        own["fp32_from_fp16_params"] = [next(read) if group else [] for group in own["fp32_from_fp16_params"]]
    _inner(own)["state"] = _read_state(part, own) | {"common_step": torch.tensor(steps)}
    return own


def _read_state(part: dict[Any, Any], own: dict[Any, Any]) -> dict[Any, Any]:
    """The moments that were read for an undivided optimizer, by number of the parameter."""
    read = (part.get("optimizer", {}) if "optimizer" in own else part).get("state", {})
    return {number: tensors for number, tensors in read.items() if number != "common_step"}


def _is_written(part: Any) -> bool:
    """Whether a part of the state is one that was saved, and not only shards that were filled."""
    groups = _inner(part).get("param_groups") if isinstance(part, dict) else None
    return bool(groups) and "lr" in groups[0]

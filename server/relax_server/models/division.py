"""How a model can be divided over several processes, by its configuration alone."""

from __future__ import annotations

from typing import Any

from relax_sdk.errors import ConfigError
from relax_sdk.layout import LayoutConfig


def moe_layers(config: Any) -> list[bool]:
    """Say of each decoder layer whether it is a mixture of experts."""
    experts = getattr(config, "num_experts", None) or 0
    dense = getattr(config, "mlp_only_layers", None) or []
    every = getattr(config, "decoder_sparse_step", 1)
    return [experts > 0 and i not in dense and (i + 1) % every == 0 for i in range(config.num_hidden_layers)]


def stages(n_layers: int, pp: int) -> list[range]:
    """Decoder layers of each pipeline stage; where they cannot be divided evenly, the first and the last have other numbers.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    if n_layers < pp:
        raise ConfigError(f"layout.pp = {pp}; allowed: 1 to {n_layers}, the decoder layers of the model")
    if n_layers % pp == 0:
        sizes = [n_layers // pp] * pp
    else:
        middle = -(-n_layers // pp)
        if n_layers - middle * (pp - 2) < 2:
            middle = n_layers // pp
        rest = n_layers - middle * (pp - 2)
        sizes = [rest // 2, *[middle] * (pp - 2), rest - rest // 2]
    starts = [sum(sizes[:i]) for i in range(pp)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def check_layout(c: Any, layout: LayoutConfig) -> None:
    """Refuse a layout that the model cannot be divided in.

    Args:
        c: the configuration of the language model.
        layout: the layout.

    Raises:
        ConfigError: the field, its value, and what the model has.
    """
    tp, ep, experts = layout.tp, layout.ep, getattr(c, "num_experts", None) or 0
    widths = {
        "attention heads": c.num_attention_heads,
        "key and value heads": c.num_key_value_heads,
        "tokens of the vocabulary": c.vocab_size,
    }
    if not all(moe_layers(c)):
        widths["channels of the MLP"] = c.intermediate_size
    if experts and layout.etp > 1:
        widths["channels of an expert"] = c.moe_intermediate_size
    for what, n in widths.items():
        if n % tp:
            raise ConfigError(f"layout.tp = {tp}: the model has {n} {what}, which {tp} processes cannot share evenly")
    if ep > 1 and not experts:
        raise ConfigError(f"layout.ep = {ep}: the model has no experts to divide; allowed: 1")
    if experts and experts % ep:
        raise ConfigError(f"layout.ep = {ep}: the model has {experts} experts, which {ep} processes cannot share evenly")
    if experts and tp > 1 and not layout.sp:
        raise ConfigError(f"layout.sp = False with layout.tp = {tp}: a mixture of experts needs sequence parallelism")
    stages(c.num_hidden_layers, layout.pp)
    if layout.vpp > 1 and c.num_hidden_layers % (layout.pp * layout.vpp):
        parts = layout.pp * layout.vpp
        raise ConfigError(
            f"layout.vpp = {layout.vpp} with layout.pp = {layout.pp}: the model has {c.num_hidden_layers} decoder layers, "
            f"which {parts} parts cannot share evenly"
        )


def stage_parts(n_layers: int, layout: LayoutConfig, stage: int) -> list[range]:
    """Decoder layers of each part of a pipeline stage, in the order in which a batch passes them; without `vpp` there is one.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    every = stages(n_layers, layout.pp * layout.vpp)
    return every[stage :: layout.pp]

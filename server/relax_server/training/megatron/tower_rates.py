"""Learning rates of towers: groups of parameters of their own in Megatron's optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

from relax_sdk.tuning import TOWERS, TowersConfig

GROUP = {tower: 2.0 + number for number, tower in enumerate(TOWERS)}
"""`lr_mult` of a tower's groups. Megatron finds groups again by it, in checkpoints too, and computes nothing with it; the rate
itself may change where a run goes on."""


def own_groups(settings: MegatronOptimizerConfig, towers: TowersConfig) -> Any:
    """What Megatron's optimizer is told of its groups: its own rules, and a group for each tower with a rate of its own."""
    overrides: dict[Any, Any] = dict(get_standard_config_overrides(settings))
    for tower in towers.with_own_rate:
        belongs = ParamWithNamePredicate(tower, lambda parameter, name, tower=tower: _tower_of(name) == tower)
        overrides[ParamKey(with_name_predicate=belongs)] = {"lr_mult": GROUP[tower]}
    return overrides


def _tower_of(parameter: str) -> str:
    """The first word of a parameter's name in the model, which Megatron's wrapper may put one before."""
    return parameter.removeprefix("module.").partition(".")[0]


def rate_of(group: Mapping[str, Any], lr: float, towers: TowersConfig, peak: float) -> float:
    """The learning rate of a group of parameters.

    Args:
        group: of the optimizer.
        lr: the rate of the step.
        towers: rates of towers.
        peak: `optimizer.lr`, of which absolute rates of towers are multiples.
    """
    tower = next((tower for tower, mark in GROUP.items() if group["lr_mult"] == mark), None)
    return lr if tower is None else lr * towers.lr_factor(tower, peak)

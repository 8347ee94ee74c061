"""One training step in any layout, compared with that of one process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_workers import Ranks, begin
from relax_server.models.catalog import resolve_model
from relax_server.models.families import Family
from relax_server.models.weight_files import read_weights
from training_data import gradients, largest_relative_difference, letter_groups, make_policy, read, with_routes

from relax_sdk.layout import LayoutConfig

CLOSE = 1e-5
"""Relative difference of a gradient, and of a metric."""
SETTINGS: dict[str, Any] = dict(token_budget=150, kl_coef=0.1)
Alone = Callable[[str, dict[str, Any]], tuple[dict[str, float], Path]]


def one_step(rank: int, layout: LayoutConfig, meeting: Path, model: str, folder: Path, settings: dict[str, Any]) -> Any:
    """A step of training; its gradients, and the weights after it, are in two folders."""
    begin(rank, layout, meeting)
    policy = make_policy(resolve_model(model), eps=1e-3, **settings)
    groups = letter_groups(policy.processor)
    if settings.get("replay_routes"):
        groups = with_routes(groups, len(policy._loaded.model.moe_layers))
    metrics = policy.train_step(groups, read, 0)
    if not layout.distributed_optimizer:  # a rank has the sum in the part that it owns alone
        gradients(policy, folder / "gradients")
    policy.export_weights(folder / "weights")
    return metrics


def with_layers(family: Family, layers: int, folder: Path) -> Path:
    """A random model like the built-in one of a family, with another number of decoder layers."""
    import torch
    from transformers import AutoConfig

    source = resolve_model(family.tiny)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = AutoConfig.from_pretrained(source)
    text = family.text(config)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1] * layers
    torch.manual_seed(0)
    built = family.model_class()
    make = built._from_config if hasattr(built, "_from_config") else built.from_config
    make(config).save_pretrained(folder)
    return folder


def of_one_process(ranks: Ranks, folder: Callable[[], Path]) -> Alone:
    """What one process does with a model and settings, computed once: (metrics, folder)."""
    known: dict[str, tuple[dict[str, float], Path]] = {}

    def of(model: str, settings: dict[str, Any]) -> tuple[dict[str, float], Path]:
        name = f"{model} {sorted(settings.items())}"
        if name not in known:
            place = folder()
            (metrics,) = ranks.run(LayoutConfig(), one_step, model, place, settings)
            known[name] = metrics, place
        return known[name]

    return of


def compare(ranks: Ranks, alone: Alone, folder: Path, model: str, layout: LayoutConfig, **settings: Any) -> dict[str, float]:
    """Compare a layout with one process.

    Returns:
        The largest relative difference of the loss (of 0.1 where it is smaller), and of a tensor of the weights, and of the
        gradients where a rank has them whole.
    """
    found = {"loss": 0.0}
    settings = SETTINGS | settings
    wanted, reference = alone(model, settings)
    for metrics in ranks.run(layout, one_step, model, folder, settings):
        for key, value in metrics.items():
            if not key.startswith(("seconds", "forest", "packed", "padded", "shared")):
                assert value == pytest.approx(wanted[key], rel=CLOSE, abs=1e-6), key
        found["loss"] = max(found["loss"], abs(metrics["loss"] - wanted["loss"]) / max(abs(wanted["loss"]), 0.1))
    kinds = {"weights": 10 * CLOSE} | ({} if layout.distributed_optimizer else {"gradients": CLOSE})
    for kind, bound in kinds.items():  # AdamW divides a gradient by its size, which makes rounding errors of small ones larger
        difference, where = largest_relative_difference(read_weights(folder / kind), read_weights(reference / kind))
        assert difference < bound, (kind, where)
        found[kind] = difference
    return found

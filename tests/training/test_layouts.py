"""However a model and its batches are divided over processes: losses, gradients and weights are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_workers import Ranks, begin
from relax_server.models.catalog import resolve_model
from relax_server.models.weight_files import read_weights
from training_data import gradients, largest_relative_difference, letter_groups, make_policy, read, with_routes

from relax_sdk.config import SamplingParams
from relax_sdk.layout import LayoutConfig

CLOSE = 1e-5
"""Relative difference of a gradient, and of a metric."""
SETTINGS: dict[str, Any] = dict(token_budget=150, kl_coef=0.1)
ONE = LayoutConfig()
pytestmark = pytest.mark.xdist_group("ranks")


def one_step(rank: int, layout: LayoutConfig, port: int, model: str, folder: Path, settings: dict[str, Any]) -> Any:
    """A step of training; its gradients, and the weights after it, are in two folders."""
    begin(rank, layout, port)
    policy = make_policy(resolve_model(model), eps=1e-3, **settings)
    groups = letter_groups(policy.processor)
    metrics = policy.train_step(with_routes(groups) if settings.get("replay_routes") else groups, read, 0)
    if not layout.distributed_optimizer:  # a rank has the sum in the part that it owns alone
        gradients(policy, folder / "gradients")
    policy.export_weights(folder / "weights")
    return metrics


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: Any) -> Any:
    """What one process does, computed once: (metrics, folder)."""
    known: dict[str, tuple[dict[str, float], Path]] = {}

    def of(model: str, settings: dict[str, Any]) -> tuple[dict[str, float], Path]:
        name = f"{model} {sorted(settings.items())}"
        if name not in known:
            folder = tmp_path_factory.mktemp("one")
            (metrics,) = ranks.run(ONE, one_step, model, folder, settings)
            known[name] = metrics, folder
        return known[name]

    return of


def compare(ranks: Ranks, alone: Any, folder: Path, model: str, layout: LayoutConfig, **settings: Any) -> None:
    """Compare a layout with one process."""
    settings = SETTINGS | settings
    wanted, reference = alone(model, settings)
    for metrics in ranks.run(layout, one_step, model, folder, settings):
        for key, value in metrics.items():
            if not key.startswith(("seconds", "forest", "packed", "padded", "shared")):
                assert value == pytest.approx(wanted[key], rel=CLOSE, abs=1e-6), key
    kinds = {"weights": 10 * CLOSE} | ({} if layout.distributed_optimizer else {"gradients": CLOSE})
    for kind, bound in kinds.items():  # AdamW divides a gradient by its size, which makes rounding errors of small ones larger
        difference, where = largest_relative_difference(read_weights(folder / kind), read_weights(reference / kind))
        assert difference < bound, (kind, where)


TEXT, OMNI = "relax/tiny-qwen3", "relax/tiny-omni"
CELLS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense dp": (TEXT, dict(dp=2), {}),
    "dense tp": (TEXT, dict(tp=2, sp=False), {}),
    "dense tp, cut": (TEXT, dict(tp=2, sp=False), dict(sampling=SamplingParams(top_p=0.9, top_k=20))),
    "dense tp, sp, recompute": (TEXT, dict(tp=2), dict(recompute=True)),
    "dense pp": (TEXT, dict(pp=2), {}),
    "dense cp": (TEXT, dict(cp=2), {}),
    "omni dp, divided optimizer": (OMNI, dict(dp=2, distributed_optimizer=True), {}),
    "omni tp, sp": (OMNI, dict(tp=2), {}),
    "omni tp, sp, ep, recompute, routes": (OMNI, dict(tp=2, ep=2), dict(recompute=True, replay_routes=True)),
    "omni pp, recompute, routes": (OMNI, dict(pp=2), dict(recompute=True, replay_routes=True)),
    "omni cp": (OMNI, dict(cp=2), {}),
    "omni dp, ep, recompute, routes": (OMNI, dict(dp=2, ep=2), dict(recompute=True, replay_routes=True)),
}


@pytest.mark.parametrize("name", CELLS)
def test_a_layout_is_one_process(ranks: Ranks, alone: Any, tmp_path: Path, name: str) -> None:
    model, layout, settings = CELLS[name]
    compare(ranks, alone, tmp_path, model, LayoutConfig(**layout), **settings)


def two_steps(rank: int, layout: LayoutConfig, port: int, folder: Path, checkpoint: Path | None) -> Any:
    """A step, a checkpoint and a step; or, from a checkpoint, the second step alone."""
    begin(rank, layout, port)
    policy = make_policy(OMNI, eps=1e-3, lr=5e-3, warmup_steps=0, token_budget=150)
    if checkpoint is not None:
        policy.load(checkpoint)
    else:
        policy.train_step(letter_groups(policy.processor), read, 0)
        policy.save(folder / "checkpoint", {})
    policy.train_step(letter_groups(policy.processor, seed=1), read, 1)
    policy.export_weights(folder / "weights")


DIVIDED = dict(distributed_optimizer=True)
WRITES = {"dp": dict(dp=2), "dp, divided optimizer": dict(dp=2) | DIVIDED, "dp, ep": dict(dp=2, ep=2), "tp": dict(tp=2)}
READS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp": dict(dp=2),
    "tp": dict(tp=2),
    "pp": dict(pp=2),
    "cp": dict(cp=2),
    "dp, ep": dict(dp=2, ep=2),
    "dp, ep, divided optimizer": dict(dp=2, ep=2) | DIVIDED,
}


@pytest.mark.parametrize("written", WRITES)
def test_a_checkpoint_goes_on_in_every_layout(ranks: Ranks, tmp_path: Path, written: str) -> None:
    """The second step is that of the run which went on in the first layout; in that layout to the last bit."""
    first = LayoutConfig(**WRITES[written])
    ranks.run(first, two_steps, tmp_path, None)
    wanted = read_weights(tmp_path / "weights")
    divided = first.distributed_optimizer
    for name, values in {**READS, written: WRITES[written]}.items():
        layout = LayoutConfig(**values)
        if layout.distributed_optimizer != divided and layout != first:
            continue
        ranks.run(layout, two_steps, tmp_path / name, tmp_path / "checkpoint")
        difference, where = largest_relative_difference(read_weights(tmp_path / name / "weights"), wanted)
        assert difference <= (0 if layout == first else 10 * CLOSE), (name, where)

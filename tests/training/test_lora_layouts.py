"""Adapters of a model that is divided over processes: gradients, weights, files and checkpoints are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from layout_steps import CLOSE
from rank_workers import Ranks, begin
from relax_server.models.adapter_files import read_adapters
from relax_server.models.catalog import resolve_model
from relax_server.models.weight_files import read_weights
from safetensors.torch import load_file
from training_data import largest_relative_difference, letter_groups, make_policy, read

from relax_sdk import ConfigError
from relax_sdk.layout import LayoutConfig
from relax_sdk.tuning import TARGETS, LoraConfig, TowersConfig, Tuning

OMNI, TEXT = "relax/tiny-omni", "relax/tiny-qwen3"
DEEPER = "as tiny-omni, with four decoder layers"
EVERYWHERE = Tuning(LoraConfig(rank=4, alpha=6.0, targets=TARGETS))
BESIDE = Tuning(LoraConfig(rank=4, alpha=6.0), TowersConfig(visual="train"))
DECODER = Tuning(LoraConfig(rank=4, alpha=6.0))
TOWER = Tuning(LoraConfig(rank=4, alpha=6.0, targets=("visual",)))
CELLS: dict[str, tuple[str, dict[str, Any], Tuning]] = {
    "dense tp": (TEXT, dict(tp=2, sp=False), DECODER),
    "dense tp, sp": (TEXT, dict(tp=2), DECODER),
    "dense pp": (TEXT, dict(pp=2), DECODER),
    "omni tp, sp": (OMNI, dict(tp=2), EVERYWHERE),
    "omni tp, sp, ep": (OMNI, dict(tp=2, ep=2), BESIDE),
    "omni pp": (OMNI, dict(pp=2), BESIDE),
    "omni pp, the second stage trains nothing": (OMNI, dict(pp=2), TOWER),
    "omni interleaved": (DEEPER, dict(pp=2, vpp=2), BESIDE),
    "omni cp": (OMNI, dict(cp=2), EVERYWHERE),
    "omni dp, ep, divided optimizer": (OMNI, dict(dp=2, ep=2, distributed_optimizer=True), EVERYWHERE),
}
STEPS = 2


def cell(name: str, deeper: Any) -> tuple[str, dict[str, Any], Tuning]:
    model, layout, tuning = CELLS[name]
    return deeper("Qwen3-Omni thinker", 4) if model == DEEPER else model, layout, tuning


def policy_of(model: str, tuning: Tuning, **settings: Any) -> Any:
    return make_policy(
        model, tuning=tuning, lr=1e-2, eps=1e-3, token_budget=150, kl_coef=0.1, publish_adapters=True, **settings
    )


def steps(rank: int, layout: LayoutConfig, meeting: Path, model: str, tuning: Tuning, folder: Path, begun: Path | None) -> Any:
    """A warm-up, steps, and all that is written; or, from a checkpoint and its reference, the last step alone."""
    begin(rank, layout, meeting)
    policy, metrics = policy_of(model, tuning), {}
    if begun is None:
        groups = letter_groups(policy.processor)
        policy.warmup_step([group.trajectories[0].samples()[0] for group in groups], read, 1e-2)
        policy.end_warmup()
        policy.export(folder / "reference")
        policy.save(folder / "checkpoint", {})
    else:
        policy.load(begun / "checkpoint")
        policy.load_reference(begun / "reference")
    for number in range(STEPS):
        metrics = policy.train_step(letter_groups(policy.processor, seed=number), read, number)
    policy.export_weights(folder / "published")
    policy.export(folder / "m")
    return metrics


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one process does: its metrics, and the folder of what it wrote; each is computed once."""
    known: dict[str, tuple[dict[str, float], Path]] = {}

    def of(model: str, tuning: Tuning) -> tuple[dict[str, float], Path]:
        key = f"{model} {tuning}"
        if key not in known:
            folder = tmp_path_factory.mktemp("one")
            known[key] = ranks.run(LayoutConfig(), steps, model, tuning, folder, None)[0], folder
        return known[key]

    return of


def written(folder: Path) -> dict[str, dict[str, Any]]:
    """All that is written with adapters, by file."""
    published = read_adapters(folder / "published")
    assert published is not None
    return {
        "published": published.tensors(),
        "adapter": load_file(folder / "m" / "adapter" / "adapter_model.safetensors"),
        "merged": read_weights(folder / "m"),
    }


def compare(folder: Path, reference: Path) -> None:
    ours, theirs = written(folder), written(reference)
    for kind, tensors in theirs.items():
        assert ours[kind].keys() == tensors.keys(), kind
        difference, where = largest_relative_difference(ours[kind], tensors)
        assert difference < 10 * CLOSE, (kind, where)
    config = "m/adapter/adapter_config.json"
    assert (folder / config).read_text() == (reference / config).read_text()


@pytest.mark.parametrize("name", CELLS)
def test_adapters_in_a_layout_are_those_of_one_process(
    ranks: Ranks, alone: Any, deeper: Any, tmp_path: Path, name: str
) -> None:
    model, layout, tuning = cell(name, deeper)
    wanted, reference = alone(model, tuning)
    for metrics in ranks.run(LayoutConfig(**layout), steps, model, tuning, tmp_path, None):
        for key in ("loss", "kl", "grad_norm", "entropy"):
            assert metrics[key] == pytest.approx(wanted[key], rel=20 * CLOSE, abs=1e-6), key
    compare(tmp_path, reference)


@pytest.mark.parametrize("name", ["omni tp, sp, ep", "omni pp", "omni pp, the second stage trains nothing", "omni interleaved"])
def test_adapters_go_on_from_a_checkpoint_of_one_process(
    ranks: Ranks, alone: Any, deeper: Any, tmp_path: Path, name: str
) -> None:
    model, layout, tuning = cell(name, deeper)
    _, reference = alone(model, tuning)
    ranks.run(LayoutConfig(**layout), steps, model, tuning, tmp_path, reference)
    compare(tmp_path, reference)


def made(rank: int, layout: LayoutConfig, meeting: Path, model: Any, tuning: Tuning) -> None:
    begin(rank, layout, meeting)
    policy_of(model, tuning)


def test_what_no_stage_has_is_refused_by_all(ranks: Ranks) -> None:
    with pytest.raises(ConfigError, match=r"the model has no experts; it has other layers"):
        ranks.run(LayoutConfig(pp=2), made, resolve_model(TEXT), Tuning(LoraConfig(rank=2, targets=("experts",))))


@pytest.mark.parametrize(
    ("layout", "tuning", "message"),
    [
        (dict(pp=2, dp=2, distributed_optimizer=True), TOWER, r"stage 1 has nothing to train"),
        (dict(dp=2, ep=2), Tuning(LoraConfig(rank=2, targets=("experts",))), r"must train something beside experts"),
    ],
    ids=["a stage trains nothing", "nothing but experts"],
)
def test_what_megatron_could_not_save_is_refused_by_all(
    ranks: Ranks, layout: dict[str, Any], tuning: Tuning, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ranks.run(LayoutConfig(**layout), made, resolve_model(OMNI), tuning)

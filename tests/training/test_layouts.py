"""However a model and its batches are divided over processes: losses, gradients and weights are those of one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from layout_steps import CLOSE, Alone, compare, of_one_process
from rank_workers import Ranks, begin
from relax_server.models.weight_files import read_weights
from relax_server.training.memory_plan import in_flight
from training_data import largest_relative_difference, letter_groups, make_policy, read

from relax_sdk.config import SamplingParams
from relax_sdk.layout import LayoutConfig
from relax_sdk.tuning import TowersConfig, Tuning


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return of_one_process(ranks, lambda: tmp_path_factory.mktemp("one"))


TEXT, OMNI = "relax/tiny-qwen3", "relax/tiny-omni"
CELLS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense dp": (TEXT, dict(dp=2), {}),
    "dense tp": (TEXT, dict(tp=2, sp=False), dict(recompute="selective")),
    "dense tp, cut": (TEXT, dict(tp=2, sp=False), dict(sampling=SamplingParams(top_p=0.9, top_k=20))),
    "dense tp, sp, recompute": (TEXT, dict(tp=2), dict(recompute=True)),
    "dense pp": (TEXT, dict(pp=2), {}),
    "dense cp": (TEXT, dict(cp=2), {}),
    "omni dp, divided optimizer": (OMNI, dict(dp=2, distributed_optimizer=True), {}),
    "omni tp, sp": (OMNI, dict(tp=2), {}),
    "omni tp, sp, ep, recompute, routes": (OMNI, dict(tp=2, ep=2), dict(recompute=True, replay_routes=True)),
    "omni pp, recompute, routes": (OMNI, dict(pp=2), dict(recompute=True, replay_routes=True)),
    "omni cp, selective recompute": (OMNI, dict(cp=2), dict(recompute="selective")),
    "omni dp, ep, recompute, routes": (OMNI, dict(dp=2, ep=2), dict(recompute=True, replay_routes=True)),
    "omni tp, sp, ep, grouped experts": (OMNI, dict(tp=2, ep=2), dict(experts="grouped")),
}


@pytest.mark.parametrize("name", CELLS)
def test_a_layout_is_one_process(ranks: Ranks, alone: Alone, tmp_path: Path, name: str) -> None:
    model, layout, settings = CELLS[name]
    compare(ranks, alone, tmp_path, model, LayoutConfig(**layout), **settings)


INTERLEAVED: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "dense": ("Qwen3", 4, dict(pp=2, vpp=2), {}),
    "dense, three parts of two layers, recompute": ("Llama", 12, dict(pp=2, vpp=3), dict(recompute=True)),
    "omni, routes": ("Qwen3-Omni thinker", 4, dict(pp=2, vpp=2), dict(replay_routes=True)),
    "omni tp, sp, ep, selective recompute": (
        "Qwen3-Omni thinker",
        4,
        dict(tp=2, pp=2, vpp=2, ep=2),
        dict(recompute="selective"),
    ),
    "dense dp, divided optimizer": ("Qwen3", 4, dict(pp=2, vpp=2, dp=2, distributed_optimizer=True), {}),
}


@pytest.mark.parametrize("name", INTERLEAVED)
def test_an_interleaved_pipeline_is_one_process(ranks: Ranks, alone: Alone, deeper: Any, tmp_path: Path, name: str) -> None:
    family, layers, layout, settings = INTERLEAVED[name]
    compare(ranks, alone, tmp_path, deeper(family, layers), LayoutConfig(**layout), **settings)


def counted(rank: int, layout: LayoutConfig, meeting: Path, model: str) -> tuple[int, list[int]]:
    """The stage of a rank, and how many forests each part of it kept activations of when they were most."""
    from relax_server.training.megatron import parallel

    begin(rank, layout, meeting)
    policy = make_policy(model, token_budget=64)
    parts = [part for _, part in policy._loaded.model.named_parts()]
    now, most = [0] * len(parts), [0] * len(parts)

    def watch(number: int, output: Any) -> None:
        def backward(gradient: Any) -> None:
            now[number] -= 1

        now[number] += 1
        if sum(now) > sum(most):
            most[:] = now
        output.register_hook(backward)

    for number, part in enumerate(parts):
        part.register_forward_hook(lambda m, a, output, number=number: watch(number, output) if m.training else None)
    policy.train_step(letter_groups(policy.processor, 12), read, 0)
    return parallel.stage(), most


@pytest.mark.parametrize("layout", [LayoutConfig(pp=2), LayoutConfig(pp=2, vpp=2), LayoutConfig(pp=3, vpp=2)], ids=str)
def test_a_stage_keeps_as_many_forests_as_planned(ranks: Ranks, deeper: Any, layout: LayoutConfig) -> None:
    for stage, most in ranks.run(layout, counted, deeper("Qwen3", 12)):
        assert most == in_flight(layout, stage), stage


Settings = Mapping[str, Any]
NONE: Settings = {}


def two_steps(
    rank: int, layout: LayoutConfig, meeting: Path, model: str, folder: Path, checkpoint: Path | None, settings: Settings = NONE
) -> Any:
    """A step, a checkpoint and a step; or, from a checkpoint, the second step alone."""
    begin(rank, layout, meeting)
    policy = make_policy(model, eps=1e-3, lr=5e-3, warmup_steps=0, token_budget=150, **settings)
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
    layouts = {name: LayoutConfig(**values) for name, values in {**READS, written: WRITES[written]}.items()}
    go_on(ranks, tmp_path, OMNI, first, layouts)


@pytest.mark.parametrize("first", [LayoutConfig(), LayoutConfig(pp=2, vpp=2)], ids=str)
def test_a_checkpoint_goes_on_with_and_without_interleaving(
    ranks: Ranks, deeper: Any, tmp_path: Path, first: LayoutConfig
) -> None:
    layouts = {"one": LayoutConfig(), "pp": LayoutConfig(pp=2), "interleaved": LayoutConfig(pp=2, vpp=2)}
    go_on(ranks, tmp_path, deeper("Qwen3-Omni thinker", 4), first, layouts)


def written_again(
    rank: int, layout: LayoutConfig, meeting: Path, model: str, checkpoint: Path, folder: Path, settings: Settings
) -> None:
    begin(rank, layout, meeting)
    policy = make_policy(model, eps=1e-3, lr=5e-3, warmup_steps=0, token_budget=150, **settings)
    policy.load(checkpoint)
    policy.save(folder / "checkpoint", {})


THROUGH = {"one": {}, "dp, divided optimizer": dict(dp=2) | DIVIDED, "tp": dict(tp=2), "pp": dict(pp=2)}


@pytest.mark.parametrize(
    ("model", "settings"),
    [(TEXT, NONE), (OMNI, {"dtype": "bfloat16", "tuning": Tuning(towers=TowersConfig(visual_lr=2e-2))})],
    ids=["float32", "bfloat16, a tower with a rate of its own"],
)
def test_a_checkpoint_that_went_through_other_layouts_has_lost_nothing(
    ranks: Ranks, tmp_path: Path, model: str, settings: Settings
) -> None:
    """Weights, their float32 masters, moments and step counts: the second step is the same to the last bit."""
    first = LayoutConfig()
    ranks.run(first, two_steps, model, tmp_path, None, settings)
    checkpoint, wanted = tmp_path / "checkpoint", read_weights(tmp_path / "weights")
    for name in ("dp, divided optimizer", "pp", "dp, divided optimizer", "tp", "one"):
        ranks.run(LayoutConfig(**THROUGH[name]), written_again, model, checkpoint, tmp_path / name, settings)
        checkpoint = tmp_path / name / "checkpoint"
        ranks.run(first, two_steps, model, tmp_path / "again", checkpoint, settings)
        assert largest_relative_difference(read_weights(tmp_path / "again" / "weights"), wanted)[0] == 0, name


def in_the_old_format(rank: int, layout: LayoutConfig, meeting: Path, folder: Path) -> None:
    """A checkpoint as format 3 had it: other names for masters, and a divided optimizer is told of."""
    from relax_server.training.megatron import checkpoint, optimizer_state

    begin(rank, layout, meeting)
    policy = make_policy(TEXT, eps=1e-3, lr=5e-3, warmup_steps=0, token_budget=150, dtype="bfloat16")
    policy.train_step(letter_groups(policy.processor), read, 0)
    identity = policy.identity() | {"layout": {"distributed_optimizer": True}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", 3)
        patch.setattr(optimizer_state, "MASTERS", optimizer_state.OLD_MASTERS)
        patch.setattr(policy, "identity", lambda: identity)
        policy.save(folder / "checkpoint", {})
    policy.train_step(letter_groups(policy.processor, seed=1), read, 1)
    policy.export_weights(folder / "weights")


def test_a_divided_optimizer_of_the_old_format_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    layout = LayoutConfig(**THROUGH["dp, divided optimizer"])
    ranks.run(layout, in_the_old_format, tmp_path)
    halves = {"dtype": "bfloat16"}
    ranks.run(LayoutConfig(), written_again, TEXT, tmp_path / "checkpoint", tmp_path / "one", halves)
    ranks.run(layout, two_steps, TEXT, tmp_path / "again", tmp_path / "one" / "checkpoint", halves)
    found, wanted = read_weights(tmp_path / "again" / "weights"), read_weights(tmp_path / "weights")
    assert largest_relative_difference(found, wanted)[0] == 0


def go_on(ranks: Ranks, folder: Path, model: str, first: LayoutConfig, layouts: dict[str, LayoutConfig]) -> None:
    ranks.run(first, two_steps, model, folder, None)
    wanted = read_weights(folder / "weights")
    for name, layout in layouts.items():
        ranks.run(layout, two_steps, model, folder / name, folder / "checkpoint")
        difference, where = largest_relative_difference(read_weights(folder / name / "weights"), wanted)
        assert difference <= (0 if layout == first else 10 * CLOSE), (name, where)

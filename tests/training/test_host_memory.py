"""What is moved to the machine's memory between its uses comes back as it was: training is the same to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_workers import Ranks, begin
from training_data import largest_difference, letter_groups, make_policy, parameters, read

from relax_sdk import ConfigError, RunConfig, TrainingConfig
from relax_sdk.layout import LayoutConfig

OMNI, TEXT = "relax/tiny-omni", "relax/tiny-qwen3"


def trained(name: str, folder: Path, settings: dict[str, Any]) -> Any:
    """Five steps, the last two of them from a checkpoint in a new policy; and the bytes that were held between steps."""
    held: list[int] = []

    def step(policy: Any) -> None:
        policy.unpark()
        policy.train_step(letter_groups(policy.processor, seed=policy.step), read, policy.step)
        policy.park()
        held.append(sum(storage.nbytes() for storage in {t.untyped_storage() for t in policy.trainer.held()}))

    first = make_policy(name, **settings)
    for _ in range(3):
        step(first)
    first.unpark()
    first.begin_save(folder / "c", {})
    step(first)
    first.finish_save()
    second = make_policy(name, **settings)
    second.load(folder / "c")
    second.park()
    for _ in range(2):
        step(second)
    second.unpark()
    return parameters(second), held[0]


@pytest.mark.parametrize(
    ("name", "settings"), [(TEXT, {"kl_coef": 0.1}), (OMNI, {}), (TEXT, {"dtype": "bfloat16"})], ids=["kl", "omni", "bf16"]
)
def test_training_is_the_same_and_the_memory_is_free_meanwhile(worker, tmp_path, name, settings):
    ways = {way: worker.run(trained, name, tmp_path / way, settings | {"offload": way}) for way in ("none", "optimizer", "all")}
    (weights, whole), (moved, without), (parked, left) = ways.values()
    assert largest_difference(weights, moved) == largest_difference(weights, parked) == 0
    assert left < 0.02 * whole < 0.2 * whole < without < 0.8 * whole


def of_a_rank(rank: int, layout: LayoutConfig, meeting: Path, folder: Path, offload: str) -> Any:
    begin(rank, layout, meeting)
    return trained(OMNI, folder, {"offload": offload})


def test_a_divided_optimizer_is_moved_too(ranks: Ranks, tmp_path: Path) -> None:
    layout = LayoutConfig(dp=2, distributed_optimizer=True)
    kept, moved = (ranks.run(layout, of_a_rank, tmp_path / way, way) for way in ("none", "optimizer"))
    for (weights, whole), (same, without) in zip(kept, moved, strict=True):
        assert largest_difference(weights, same) == 0 and without < 0.9 * whole


def turns(way: str) -> bool:
    return make_policy(TEXT, offload=way, takes_turns=True).parks


def test_who_takes_turns_with_engines_leaves_the_device_where_it_is_a_gpu(worker):
    assert [worker.run(turns, way) for way in ("auto", "none", "optimizer", "all")] == [False, False, False, True]
    with pytest.raises(ConfigError, match="needs mode='colocate'"):
        RunConfig("tone-v0", training=TrainingConfig(offload="all"))
    assert RunConfig("tone-v0", mode="colocate", max_staleness=0, training=TrainingConfig(offload="all"))

"""What roles compute of a group beside the policy is what the policy computes itself."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_server.training.group_fields import Given, advantages_field, by_turn, field_names, flat_logprobs
from relax_server.training.samples import collect
from sample_groups import make_group
from training_data import letter_groups, make_policy, read

from relax_sdk.config import AlgorithmConfig, RunConfig, TrainingConfig
from relax_sdk.errors import TrainingError
from relax_sdk.tuning import LoraConfig

OMNI, TEXT = "relax/tiny-omni", "relax/tiny-qwen3"


def groups_of_all_kinds() -> list[Any]:
    """Episodes of one and of several turns, and some that failed before the first."""
    groups = [make_group("a", versions=(0, None, 0)), make_group("b", versions=(None, 0))]
    for i, trajectory in enumerate(groups[0].trajectories):
        trajectory.turns *= i + 1
        for n, turn in enumerate(trajectory.turns):
            turn.reward = n / 3
    return groups


@pytest.mark.parametrize(("advantage", "credit"), list(product(["grpo", "dr_grpo", "rloo"], ["trajectory", "turn"])))
def test_advantages_are_those_of_the_policy(advantage: Any, credit: Any) -> None:
    algorithm, groups = AlgorithmConfig(advantage=advantage, credit=credit, gamma=0.9), groups_of_all_kinds()
    own = collect(groups, algorithm)
    given = collect(groups, algorithm, [by_turn(group, advantages_field(group, algorithm)) for group in groups])
    assert any(any(values) for values in own.advantages)
    assert [np.array(values, np.float32).tolist() for values in own.advantages] == given.advantages
    assert (own.samples, own.group) == (given.samples, given.group)


def test_fields_of_another_group_are_refused() -> None:
    group = make_group("a")
    with pytest.raises(TrainingError, match=r"group 'a' has 2 turns, but its field 'advantages' has shape \[3\]"):
        by_turn(group, np.zeros(3, np.float32))
    with pytest.raises(TrainingError, match="5 trained tokens, but its fields 'ref_log_probs' have 3 numbers"):
        flat_logprobs([np.zeros(2), np.zeros(1)], 5)
    assert field_names(RunConfig("tone-v0")) == ("advantages",)
    assert field_names(RunConfig("tone-v0", algorithm=AlgorithmConfig(kl_coef=0.1))) == ("advantages", "ref_log_probs")
    adapted = RunConfig("tone-v0", algorithm=AlgorithmConfig(kl_coef=0.1), lora=LoraConfig(rank=4))
    assert field_names(adapted) == ("advantages",)  # the policy is its own reference


def with_fields(name: str, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    from relax_server.training.model import LogprobModel

    settings |= dict(kl_coef=0.5, lr=2e-3, warmup_steps=0)
    own, other = make_policy(name, **settings), make_policy(name, own_reference=False, **settings)
    own.export(folder / "reference")
    training = TrainingConfig(**{k: v for k, v in settings.items() if k in ("token_budget", "share_prompts")})
    reference = LogprobModel(folder / "reference", training=training, seed=7)
    out: dict[str, Any] = {"own": [], "given": [], "difference": []}
    for step in range(3):
        groups = letter_groups(own.processor, seed=step)
        with own._reference.in_place():
            samples = [s for g in groups for t in g.trajectories for s in t.samples()]
            expected = np.concatenate(own.logprobs(samples, read))
        logprobs = [values for part in (groups[:1], groups[1:]) for values in reference.group_logprobs(part, read)]
        assert all(values.dtype == np.float32 for values in logprobs)
        out["difference"].append(float(np.abs(np.concatenate(logprobs) / expected - 1).max()))
        given = Given([advantages_field(g, own.algorithm) for g in groups], logprobs)
        out["own"].append(own.train_step(groups, read, step))
        out["given"].append(other.train_step(groups, read, step, given))
    try:
        other.train_step(groups, read, 3, Given(given.advantages))
    except TrainingError as error:
        out["missing"] = str(error)
    return out


@pytest.mark.parametrize(("name", "settings"), [(TEXT, {"updates_per_batch": 2}), (OMNI, {}), (OMNI, {"share_prompts": False})])
def test_training_on_given_fields_is_training_on_own_ones(worker, tmp_path, name, settings):
    got = worker.run(with_fields, name, tmp_path, settings)
    assert max(got["difference"]) < 1e-6, "relative: groups are packed otherwise, so sums are rounded otherwise"
    assert got["own"][2]["kl"] > 1e-4
    for own, given in zip(got["own"], got["given"], strict=True):
        for metric in ("loss", "kl", "grad_norm", "entropy", "reward"):
            assert given[metric] == pytest.approx(own[metric], rel=1e-4, abs=1e-6), metric
    assert "keeps no reference" in got["missing"]

"""An episode that failed has no reward: it is in no baseline, in no mean, and is not trained on."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from relax_server.roles.batch_figures import batch_figures
from relax_server.training.group_fields import advantages_field, by_turn
from relax_server.training.samples import collect, group_advantages
from training_data import largest_difference, letter_groups, make_policy, parameters, read

from relax_sdk.config import AlgorithmConfig
from relax_sdk.trajectory import Group, Status

TEXT = "relax/tiny-qwen3"


def fail(groups: list[Group]) -> None:
    """One episode of each group has failed after its answer; its neighbours have the others' rewards as before."""
    for index, group in enumerate(groups):
        failed = group.trajectories[index % len(group.trajectories)]
        failed.status, failed.reward, failed.rewards = (Status.FAILED, Status.TIMED_OUT)[index % 2], 0.0, {}
        failed.info = {"failure": "EnvError"}


def without(groups: list[Group]) -> list[Group]:
    return [Group(group.id, group.env, group.task_index, group.counted) for group in groups]


def both(settings: dict[str, Any]) -> tuple[list[float], list[dict[str, float]], int]:
    """Steps on groups with failed episodes, and on the same groups without them."""
    weights, metrics, tokens = [], [], []
    for take in (lambda groups: groups, without):
        policy = make_policy(TEXT, eps=1e-3, lr=5e-3, warmup_steps=0, **settings)
        for seed in range(2):
            groups = letter_groups(policy.processor, seed=seed)
            fail(groups)
            metrics.append(policy.train_step(take(groups), read, seed))
            assert policy.tokens is not None
            tokens.append({t.id for t in policy.tokens.collected.trajectories})
        weights.append(parameters(policy))
    assert tokens[:2] == tokens[2:]
    return [largest_difference(*weights)], metrics, len(tokens[0])


@pytest.mark.parametrize("settings", [{}, dict(kl_coef=0.5)])
def test_a_step_with_failed_episodes_is_the_step_without_them(worker: Any, settings: dict[str, Any]) -> None:
    differences, metrics, trained = worker.run(both, settings)
    timeless = [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in metrics]
    assert differences == [0.0] and timeless[:2] == timeless[2:]
    assert trained == 4 * 6 - 4


@pytest.mark.parametrize(("advantage", "credit"), list(product(["grpo", "dr_grpo", "rloo"], ["trajectory", "turn"])))
def test_the_others_are_compared_without_it(worker: Any, advantage: Any, credit: Any) -> None:
    algorithm = AlgorithmConfig(advantage=advantage, credit=credit)
    groups = worker.run(failed_groups)
    for group, bare in zip(groups, without(groups), strict=True):
        values = group_advantages(group, algorithm)
        kept = [v for v, t in zip(values, group.trajectories, strict=True) if t.failure is None]
        assert kept == group_advantages(bare, algorithm) and any(any(v) for v in kept)
        assert [v for v, t in zip(values, group.trajectories, strict=True) if t.failure] == [[0.0]]
        assert np.allclose(np.concatenate(by_turn(group, advantages_field(group, algorithm))), np.concatenate(values))
    both_ways = collect(groups, algorithm), collect(without(groups), algorithm)
    assert both_ways[0].reward == both_ways[1].reward and both_ways[0].reward_std == both_ways[1].reward_std


def failed_groups() -> list[Group]:
    groups = letter_groups(make_policy(TEXT).processor)
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.reward += 1.0  # so that the 0 of one that failed would be the lowest
    fail(groups)
    return groups


def test_the_figures_of_a_batch_count_them_by_how_they_ended_alone(worker: Any) -> None:
    groups = worker.run(failed_groups)
    figures = batch_figures(groups, 1)
    assert figures["status"] == {"completed": 20, "failed": 2, "timed_out": 2}
    assert figures["reward_min"] == 1.0


def test_a_group_in_which_all_failed_teaches_nothing(worker: Any) -> None:
    [group, *_] = worker.run(failed_groups)
    for trajectory in group.trajectories:
        trajectory.status = Status.FAILED
    assert group_advantages(group, AlgorithmConfig()) == [[0.0]] * 6
    assert collect([group], AlgorithmConfig()).samples == []

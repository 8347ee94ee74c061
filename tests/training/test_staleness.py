"""Staleness in a run that takes several optimizer steps on each batch: what is counted, what is dropped, what is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from relax_server.roles.messages import StepDone
from role_run import RoleRun, train_in
from training_data import letter_groups

from relax_sdk.config import AlgorithmConfig, RolloutConfig, RunConfig
from relax_sdk.trajectory import Group, VersionSpan

TEXT = "relax/tiny-qwen3"
SIZE = 4


def begun_at(group: Group, *versions: int) -> Group:
    """The group with weights of these versions: the first for the first token of each answer, the last for the others."""
    for trajectory in group.trajectories:
        turn = trajectory.turns[0]
        turn.weight_versions = [VersionSpan(versions[0], 0, 1), VersionSpan(versions[-1], 1, len(turn.response_ids))]
    return group


def several_updates(folder: Path) -> tuple[RoleRun, list[str], int]:
    """Three batches of two groups and two optimizer steps each, whose tokens may be three steps old; the run, the folders of
    weights that it has put out, and the tokens of the second batch."""
    from relax_server.models.catalog import resolve_model
    from relax_server.models.processor import Processor

    config = RunConfig(
        "test-v0",
        model=TEXT,
        steps=3,
        max_staleness=3,
        algorithm=AlgorithmConfig(updates_per_batch=2),
        rollout=RolloutConfig(groups_per_step=2, group_size=SIZE),
    )
    first, second, mixed, fresh, old, late, last = letter_groups(Processor.load(resolve_model(TEXT)), 7, SIZE)
    groups = [first, second, begun_at(mixed, 0, 2), begun_at(fresh, 2), begun_at(old, 0), begun_at(late, 1), begun_at(last, 4)]
    tokens = sum(trajectory.n_response_tokens for group in (mixed, fresh) for trajectory in group.trajectories)
    run = train_in(folder, config, groups)
    return run, sorted(path.name for path in (folder / "weights").iterdir()), tokens


@pytest.fixture(scope="module")
def trained(worker, tmp_path_factory) -> tuple[RoleRun, list[str], int]:
    return worker.run(several_updates, tmp_path_factory.mktemp("run"))


def test_versions_count_optimizer_steps(trained):
    run, weights, _ = trained
    assert [done.step for done in run.said(StepDone)] == [1, 2, 3]
    assert [done.metrics["updates"] for done in run.said(StepDone)] == [2, 2, 2]
    assert weights == ["v0", "v2", "v4", "v6"]


def test_a_group_that_is_too_many_optimizer_steps_old_is_dropped(trained):
    run, _, _ = trained
    assert [done.metrics["dropped"] for done in run.said(StepDone)] == [0, 0, 1]
    assert (run.counts.acked, run.counts.stale) == (6, 1)
    assert run.said(StepDone)[2].metrics["staleness_histogram"] == {"0": SIZE, "3": SIZE}


def test_the_staleness_of_tokens_is_reported_beside_that_of_trajectories(trained):
    """A trajectory is as old as its oldest token, and its tokens are younger in the mean."""
    run, _, tokens = trained
    metrics = run.said(StepDone)[1].metrics
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (1.0, 2)
    assert metrics["token_staleness_mean"] == pytest.approx(2 * SIZE / tokens)
    assert metrics["token_staleness_max"] == 2
    assert metrics["token_staleness_mean"] < metrics["staleness_mean"]

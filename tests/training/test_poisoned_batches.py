"""The trainer among groups that no step can be made with: they are set aside with the reason, the others are trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from elastic_run import Heard
from prepared_job import prepared_job
from relax_server.roles.messages import StepDone, Warn
from role_run import RoleRun, commit_in, train_in
from training_data import letter_groups, make_policy, parameters, read

import relax_sdk as relax
from relax_sdk.config import RolloutConfig, RunConfig, TrainingConfig
from relax_sdk.errors import TokenError, TrainingError
from relax_sdk.trajectory import Group

OMNI = "relax/tiny-omni"
SIZE = 4


def groups_of_run(processor: Any, n: int, poisoned: list[int]) -> list[Group]:
    """Groups, of which some hold a token that no policy can have sampled."""
    groups = letter_groups(processor, n, SIZE)
    for index in poisoned:
        groups[index].trajectories[1].turns[0].response_ids[0] = processor.banned_ids[0]
    return groups


def train(folder: Path, poisoned: list[int], mode: str, steps: int) -> RoleRun:
    """Train in a run folder whose journal holds the groups, until the last step or an error."""
    from relax_server.models.catalog import resolve_model
    from relax_server.models.processor import Processor

    config = RunConfig(
        "test-v0",
        model=OMNI,
        steps=steps,
        mode=mode,  # type: ignore[arg-type]
        max_staleness=0 if mode == "colocate" else 100,
        rollout=RolloutConfig(groups_per_step=2, group_size=SIZE),
        training=TrainingConfig(checkpoint_every=100),
    )
    return train_in(folder, config, groups_of_run(Processor.load(resolve_model(OMNI)), 2 * steps + len(poisoned), poisoned))


def steps_of(run: RoleRun) -> list[int]:
    return [done.step for done in run.said(StepDone)]


def states(run: RoleRun) -> tuple[int, int, int]:
    """Groups that are acked, set aside, and left."""
    return run.counts.acked, run.counts.failed, run.counts.leased + run.counts.ready


def test_poisoned_groups_are_set_aside_and_all_others_trained_on(worker, tmp_path):
    got = worker.run(train, tmp_path, [1, 4], "async", 3)
    assert steps_of(got) == [1, 2, 3]
    assert states(got) == (6, 2, 0)
    assert list(got.failures) == ["g1", "g4"]
    assert all("never be sampled" in reason for reason in got.failures.values())
    told = [warning.text for warning in got.said(Warn)]
    assert len(told) == 2 and "group g1 cannot be trained on" in told[0]


def test_where_the_engines_wait_for_the_trainer_it_begins_again_without_the_group(worker, tmp_path):
    first = worker.run(train, tmp_path, [1], "colocate", 1)
    assert "never be sampled" in first.error
    assert (steps_of(first), states(first)) == ([], (0, 1, 2))
    second = worker.run(train, tmp_path, [1], "colocate", 1)
    assert not second.error
    assert (steps_of(second), states(second)) == ([1], (2, 1, 0))


def attempts() -> dict[str, Any]:
    import torch

    policy = make_policy(OMNI)
    groups = groups_of_run(policy.processor, 2, [1])
    before, step = parameters(policy), policy.step
    policy.attempt(groups[0], read, 0)
    out: dict[str, Any] = {"errors": []}
    for attempt in (lambda: policy.attempt(groups[1], read, 0), lambda: policy.train_step(groups, read, 0)):
        try:
            attempt()
        except TokenError as error:
            out["errors"].append(str(error))
    hook = policy._loaded.model.gpt.decoder.register_forward_hook(lambda m, a, got: got * torch.nan)
    try:
        policy.attempt(groups[0], read, 0)
    except TrainingError as error:
        out["errors"].append(str(error))
    finally:
        hook.remove()
    after = parameters(policy)
    out["same"] = policy.step == step and all((before[k] == after[k]).all() for k in before)
    fresh = make_policy(OMNI).train_step(groups[:1], read, 0)
    out["next"] = policy.train_step(groups[:1], read, 0)["grad_norm"] == pytest.approx(fresh["grad_norm"], rel=1e-6)
    return out


def test_an_attempt_with_one_group_says_what_is_wrong_and_changes_nothing(worker):
    got = worker.run(attempts)
    assert ["never be sampled" in e for e in got["errors"]] == [True, True, False]
    assert "not finite" in got["errors"][2]
    assert got["same"] and got["next"]


@pytest.mark.nightly
@pytest.mark.parametrize(("mode", "begins_again"), [("async", 0), ("colocate", 1)])
async def test_a_run_goes_on_without_a_poisoned_group(tmp_path, mode, begins_again):
    """The first batch of a whole run holds it, with groups that the rollout plays."""
    from relax_server.journal import open_journal
    from relax_server.models.catalog import resolve_model
    from relax_server.models.processor import Processor
    from relax_server.roles.launch import Launch
    from relax_server.roles.layout import RunLayout

    rollout = {"groups_per_step": 2, "group_size": SIZE, "max_turns": 1}
    staleness = 0 if mode == "colocate" else 1
    settings = {"mode": mode, "max_staleness": staleness, "warmup": {"steps": 0}, "eval": {"every": 0, "limit": 4}}
    job = prepared_job(relax.Trainer("tone-v0", folder=tmp_path / "run", rollout=rollout, **settings), steps=3)
    commit_in(job.folder, groups_of_run(Processor.load(resolve_model(OMNI)), 1, [0]))
    heard = Heard()
    await Launch(job, heard).run()
    assert [row["step"] for row in heard.steps if "seconds_step" in row][:3] == [1, 2, 3]
    assert heard.steps[-1]["set_aside_total"] == 1
    assert sum("group g0 cannot be trained on and was set aside: TokenError" in text for text in heard.warnings) == 1
    assert sum("starting it again" in text for text in heard.warnings) == begins_again
    journal = open_journal(RunLayout(job.folder).journal)
    counts = journal.counts(job.folder.name)
    assert (counts.acked, counts.failed, counts.total) == (6, 1, 7)  # another group was played in its place
    assert "never be sampled" in journal.failures(job.folder.name)["g0"]
    journal.close()

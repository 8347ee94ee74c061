"""Failures are data: each failed attempt is kept, up to a number, and too large a share of them ends a run."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, cast

import pytest
from relax_server.journal.base import TrajectoryQuery
from relax_server.rollout import failure_limits
from relax_server.rollout.failure_limits import FailureLimits
from relax_server.rollout.group import GroupResult
from relax_server.rollout.warmup import make_warmup
from rollout_bench import until

from relax_sdk import Env, RolloutConfig, RunError
from relax_sdk.trajectory import Group, Status, Trajectory

ALL = TrajectoryQuery(split="failed", sort="oldest")


def flaky(fails: Any) -> type[Env]:
    """An environment whose step raises where `fails(number)` says so; numbers count the episodes."""

    class Flaky(Env):
        started = 0

        def reset(self, *, seed=None, options=None):
            self.number = type(self).started
            type(self).started += 1
            return f"question {self.number}", {}

        def step(self, action):
            if fails(self.number):
                raise ValueError(f"boom {self.number}")
            return None, 1.0, True, False, {}

    return Flaky


async def played(made: Any, groups: int) -> None:
    """A run until so many groups are committed."""
    running = asyncio.create_task(made.worker.run())
    await until(lambda: running.done() or made.worker.admission.committed >= groups)
    made.worker.stop()
    await running


async def test_an_attempt_that_was_tried_again_is_kept_with_what_was_said(bench):
    made = bench(flaky(lambda number: number == 0), groups_per_step=2, run_config={"max_staleness": 0}, concurrency=1)
    await played(made, 2)
    [row] = made.journal.find("run", ALL)
    kept = made.journal.trajectory(row.id)
    assert (row.status, row.split, row.attempts) == ("failed", "failed", 1) and "ValueError: boom 0" in row.error
    assert [message["role"] for message in kept.messages] == ["user", "assistant"] and kept.failure == "EnvError"
    assert kept.turns[0].response_ids and kept.id.startswith(f"run/train/{kept.task_index}/0/failed-")
    [good] = made.journal.find("run", TrajectoryQuery(split="train", task_index=kept.task_index))
    assert (good.status, good.attempts) == ("completed", 2)
    assert made.journal.counts("run").total == 2, "nobody is ever served it"


@pytest.mark.parametrize(("policy", "beside"), [("drop", 1), ("count", 0)])
async def test_each_failed_attempt_is_in_the_journal_once(bench, policy, beside):
    made = bench(flaky(lambda number: number == 1), group_size=3, groups_per_step=1, on_failure=policy, run_config={"steps": 1})
    await played(made, 1)
    rows = made.journal.find("run", TrajectoryQuery(statuses=("failed",)))
    assert Counter(row.split for row in rows) == ({"failed": 1} if beside else {"train": 1})


async def test_attempts_of_groups_that_fail_as_a_whole_and_of_evaluations_are_kept(bench):
    class ByTask(Env):
        """Task 0 fails always, task 1 the first time."""

        tries = Counter[int]()

        def reset(self, *, seed=None, options=None):
            index = (options or {})["task"]["index"]
            self.tries[index] += 1
            if index == 0 or (index == 1 and self.tries[index] == 1):
                raise ValueError("boom")
            return "question", {}

        def step(self, action):
            return None, 1.0, True, False, {}

    made = bench(ByTask, tasks=[{"index": index} for index in range(50)], groups_per_step=2, max_retries=1)
    running = asyncio.create_task(made.worker.run())
    await until(lambda: made.journal.count("run", ALL) == 3)
    made.worker.stop()
    await running
    kept = [(row.task_index, row.attempts) for row in made.journal.find("run", ALL)]
    assert sorted(kept) == [(0, 1), (0, 2), (1, 1)]
    other = bench(flaky(lambda number: number == 0), tasks={"train": [{}], "eval": [{}, {}]}, concurrency=1)
    result = await other.worker.evaluate()
    assert result.n == 2 and result.failures == {}
    [row] = other.journal.find("run", ALL)
    assert row.id.startswith("run/eval/0/0/0/failed-")


async def test_a_broken_environment_fills_no_disk(bench):
    env = flaky(lambda number: number % 2 == 0)
    made = bench(env, groups_per_step=6, keep_failed=2, run_config={"max_staleness": 0}, concurrency=1)
    await played(made, 6)
    assert made.journal.count("run", ALL) == 2 and made.worker.stats().failures["EnvError"] >= 6
    again = bench(env, groups_per_step=6, keep_failed=2, concurrency=1)
    again.journal.close()
    again.worker.journal = again.worker._committer.journal = again.journal = made.journal
    await played(again, 8)
    assert made.journal.count("run", ALL) == 2, "those of an earlier start count"


async def test_too_large_a_share_of_failures_ends_the_run_with_the_commonest_causes(bench, monkeypatch):
    monkeypatch.setattr(failure_limits, "WINDOW", 40)
    made = bench(flaky(lambda number: number % 4), groups_per_step=16, max_retries=0, max_failed_groups=1000, concurrency=1)
    with pytest.raises(RunError) as caught:
        await played(made, 1000)
    text = str(caught.value)
    assert "75% of the last 40 attempts failed, more than rollout.max_failed_share = 0.5 allows" in text
    assert "30 × EnvError (ValueError at test_failures.py:" in text and "the last failure: test-v0, train task" in text
    assert "Mend the environment and resume the run" in text


def attempt(failure: str | None, error: str = "") -> Trajectory:
    status = Status.FAILED if failure else Status.COMPLETED
    info = {"failure": failure} if failure else {}
    return Trajectory("t", "e", "1", 0, "g", 0, 1, 0, status, error=error or None, info=info)


def group(failed: list[Trajectory], usable: int) -> GroupResult:
    good = [attempt(None) for _ in range(usable)]
    return GroupResult(
        cast(Group, object()) if usable else None, good, error=failed[-1].error if failed else None, failed=failed
    )


def test_causes_are_told_by_what_was_raised_where_and_the_commonest_first() -> None:
    limits = FailureLimits(RolloutConfig(groups_per_step=1, group_size=4, max_failed_share=0.25))
    wrong = [attempt("EnvError", f"e, train task {n}, step: raised ValueError: bad {n} (m.py:22)") for n in range(70)]
    late = [attempt("EpisodeTimeout", f"e, train task {n}, step: took longer than 3 s") for n in range(20)]
    assert limits.ended(group(wrong, 100)) is None, "the window is not full"
    assert limits.ended(group(late, 66)) == (
        "35% of the last 256 attempts failed, more than rollout.max_failed_share = 0.25 allows: "
        "70 × EnvError (ValueError at m.py:22), 20 × EpisodeTimeout (took longer than 3 s); "
        "the last failure: e, train task 19, step: took longer than 3 s"
    )


def test_old_failures_are_forgotten() -> None:
    limits = FailureLimits(RolloutConfig(groups_per_step=1, group_size=4))
    assert limits.ended(group([attempt("EnvError", "x") for _ in range(120)], 100)) is None
    assert limits.ended(group([], 200)) is None
    assert limits.ended(group([attempt("EnvError", "x") for _ in range(120)], 136)) is None, "120 of the last 256"
    assert limits.ended(group([attempt("EnvError", "x") for _ in range(129)], 0)) is not None


def test_the_last_failure_is_told_also_where_a_usable_group_fills_the_window() -> None:
    limits = FailureLimits(RolloutConfig(groups_per_step=1, group_size=4))
    assert limits.ended(group([attempt("EnvError", "x") for _ in range(200)], 1)) is None
    told = limits.ended(group([], 56))
    assert told is not None and told.endswith("the last failure: x"), told


class Doubtful(Env):
    """Its first reset fails, or every one where `always`; `format_example` answers in a warm-up."""

    always = False
    begun = 0

    def reset(self, *, seed=None, options=None):
        type(self).begun += 1
        if self.always or self.begun == 1:
            raise ValueError("boom")
        return "question", {}

    def step(self, action):
        return None, 1.0, True, False, {}

    def format_example(self, rng):
        return "A"


async def test_failed_attempts_of_a_warm_up_are_kept_and_only_the_others_are_imitated(bench, monkeypatch):
    monkeypatch.setattr(Doubtful, "begun", 0)
    made = bench(Doubtful, concurrency=1)
    assert await make_warmup(made.worker, 1, 3) == 1
    [row] = made.journal.find("run", ALL)
    assert (row.status, row.id.startswith("run/warmup/0/0/failed-")) == ("failed", True)
    [imitated] = made.journal.groups("run", "warmup")
    assert len(imitated.trajectories) == 2 == len(imitated.counted)


async def test_a_warm_up_ends_with_the_commonest_causes(bench, monkeypatch):
    monkeypatch.setattr(failure_limits, "WINDOW", 8)
    made = bench(flaky(lambda number: False), groups_per_step=1)
    monkeypatch.setattr(made.worker.context.env_class, "format_example", lambda self, rng: "A", raising=False)
    monkeypatch.setattr(made.worker.context.env_class, "step", broken_twice_of_three, raising=False)
    with pytest.raises(RunError, match=r"^the format warm-up: .*% of the last 8 attempts failed.* × EnvError \(ValueError at"):
        await make_warmup(made.worker, 9, 3)
    assert made.journal.count("run", ALL) == 6


def broken_twice_of_three(self, action):
    """A step that raises for two episodes of three."""
    if self.number % 3:
        raise ValueError("boom")
    return None, 1.0, True, False, {}


async def test_an_evaluation_ends_with_the_commonest_causes_and_what_was_played_stays(bench, monkeypatch):
    monkeypatch.setattr(failure_limits, "WINDOW", 20)
    monkeypatch.setattr(Doubtful, "always", True)
    made = bench(Doubtful, tasks={"train": [{}], "eval": [{}] * 30}, groups_per_step=1, max_retries=1, concurrency=1)
    with pytest.raises(RunError, match=r"of test-v0: 8 groups in a row .*16 × EnvError \(ValueError at test_f"):
        await made.worker.evaluate()
    assert made.journal.count("run", TrajectoryQuery(split="eval", statuses=("failed",))) >= 8
    assert made.journal.count("run", ALL) >= 8, "the first attempts, which were tried again"

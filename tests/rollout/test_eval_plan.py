"""Evaluations that go on: what the journal holds is not played again, unless it failed."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
from relax_server.rollout.eval_plan import play_plan

import relax_sdk as relax
from relax_sdk.errors import ConfigError
from relax_sdk.evals.plan import EvalPlan
from relax_sdk.evaluation import Played

TASKS = {s: [{"n": n, "tags": ["all", "odd" if n % 2 else "even"]} for n in range(6)] for s in ("train", "eval")}


class Once(relax.Env):
    """One turn; counts how often each task is played, and fails those that `broken` names."""

    blocking = False
    played: ClassVar[Counter[int]] = Counter()
    broken: ClassVar[set[int]] = set()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        n = options["task"]["n"]
        self.played[n] += 1
        if n in self.broken:
            raise ConnectionError("the database is away")
        return f"task {n}?", {}

    def step(self, action):
        return None, float(action.text == "A"), True, False, {}


@pytest.fixture(autouse=True)
def anew():
    Once.played, Once.broken = Counter(), set()


async def run(made: Any, plan: EvalPlan, told: list[Played] | None = None):
    worker = made.worker
    return await play_plan(worker.evaluator, made.journal, worker.config, plan, None if told is None else told.append)


async def test_what_is_played_already_is_not_played_again(bench):
    made = bench(Once, "A", TASKS)
    first = await run(made, EvalPlan(limit=2))
    assert [(e.task, e.reward) for e in first.episodes] == [(0, 1.0), (1, 1.0)] and first.of == 2
    told: list[Played] = []
    whole = await run(made, EvalPlan(limit=100), told)
    assert whole.of == 6 and [e.task for e in whole.episodes] == list(range(6)) and whole.episodes[:2] == first.episodes
    assert Once.played == Counter({n: 1 for n in range(6)})
    assert (told[0].episodes, told[0].before, told[-1].episodes) == (2, 2, 6), "it begins where it ended"
    again = await run(made, EvalPlan(limit=3))
    assert again.episodes == whole.episodes[:3] and sum(Once.played.values()) == 6


async def test_tasks_that_failed_are_kept_and_played_again(bench):
    Once.broken = {1, 4}
    made = bench(Once, "A", TASKS, max_retries=0)
    first = await run(made, EvalPlan())
    failed = [e for e in first.episodes if e.failure is not None]
    assert [e.task for e in failed] == [1, 4] and {e.failure for e in failed} == {"EnvError"}
    assert "the database is away" in str(failed[0].error)
    second = await run(made, EvalPlan())
    assert [e.failure for e in second.episodes].count("EnvError") == 2 and Once.played[1] == 2 and Once.played[0] == 1
    Once.broken = set()
    third = await run(made, EvalPlan())
    assert len(third.episodes) == 6 and all(e.failure is None for e in third.episodes)
    ids = {g.id for g in made.journal.groups("run", split="eval") if g.task_index == 1}
    assert ids == {"run/eval/0/1", "run/eval/0.1/1", "run/eval/0.2/1"}, "failed tries are data, too"


async def test_samples_and_tags(bench):
    made = bench(Once, "A", TASKS)
    found = await run(made, EvalPlan(samples=3, limit=2))
    assert [(e.task, e.sample) for e in found.episodes] == [(t, s) for t in range(2) for s in range(3)]
    assert found.by == "tags" and found.episodes[-1].tags == ("all", "odd")
    assert await run(made, EvalPlan(samples=3, limit=2)) == found, "read from the journal it is the same"
    with pytest.raises(ConfigError, match="no such column; there are n, tags"):
        await run(made, EvalPlan(by="level"))


async def test_an_answer_without_a_token_is_a_failure_of_its_own(bench):
    made = bench(Once, lambda request: [], TASKS)
    found = await run(made, EvalPlan(limit=1))
    assert [(e.failure, e.reward) for e in found.episodes] == [("NoAnswer", 0.0)]

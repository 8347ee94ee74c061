"""The format warm-up: what its episodes hold, and what of the environment it never asks."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from relax_server.rollout.warmup import make_warmup
from rollout_bench import until

import relax_sdk as relax
from relax_sdk.examples import gives_examples
from relax_sdk.trajectory import derive_seed


class Letters(relax.Env):
    """Two turns, each answered with one letter; `format_example` needs what `reset` sets."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn, self.allowed = 0, ["x", "y"]
        return f"task {options['task']['index']}", {}

    def step(self, action):
        self.turn += 1
        return f"turn {self.turn}", 0.5, self.turn == 2, False, {}

    def format_example(self, rng) -> Any:
        return f"{self.allowed[rng.integers(2)]}{self.turn}"


async def warmed_up(made, groups: int = 1, batch_size: int = 2):
    """The trajectories of a warm-up, as the journal has them."""
    assert await make_warmup(made.worker, groups, batch_size) == groups
    return [t for group in made.journal.groups("run", "warmup") for t in group.trajectories]


async def test_a_warm_up_holds_well_formed_answers_at_every_turn(bench, processor):
    made = bench(Letters)
    trajectories = await warmed_up(made)
    assert len(trajectories) == 2
    for index, trajectory in enumerate(trajectories):
        assert trajectory.seed == derive_seed(0, "warmup", index)
        answers = [m["content"] for m in trajectory.messages if m["role"] == "assistant"]
        assert [a[1:] for a in answers] == ["0", "1"] and {a[0] for a in answers} <= {"x", "y"}
        assert [processor.decode(t.response_ids) for t in trajectory.turns] == [f"{a}<|im_end|>" for a in answers]
        assert len(trajectory.samples()) == 1
    assert made.engine.requests == [], "no engine is asked"


async def test_nothing_of_a_warm_up_is_scored(bench):
    asked = []

    def group_reward(trajectories):
        asked.append("group")
        raise AssertionError("a warm-up has no group rewards")

    async def judge(trajectory):
        asked.append("rubric")
        raise AssertionError("a warm-up asks no judge")

    class Scored(Letters):
        rubric = relax.Rubric([judge], group_functions=[group_reward])
        closed = 0

        @relax.reward
        def method(self, trajectory):
            asked.append("method")
            raise AssertionError("a warm-up calls no reward function")

        def close(self):
            type(self).closed += 1

    made = bench(Scored)
    trajectories = await warmed_up(made, 2, 3)
    assert len(trajectories) == 6 and asked == []
    assert {(t.status, t.reward, str(t.rewards)) for t in trajectories} == {(relax.Status.COMPLETED, 0.0, "{}")}
    await until(lambda: Scored.closed == 6)


async def test_a_warm_up_counts_its_episodes_while_it_plays(bench):
    counts = []

    class Counted(Letters):
        def step(self, action):
            counts.append(made.worker.stats().warmup)
            return super().step(action)

    made = bench(Counted, concurrency=1)
    await warmed_up(made, 2, 2)
    assert counts == [(0, 4), (0, 4), (1, 4), (1, 4), (2, 4), (2, 4), (3, 4), (3, 4)]
    assert made.worker.stats().warmup == (4, 4) and made.worker.stats().ended == 0


WRONG = {
    "raises": (lambda self, rng: self.nothing, "raised AttributeError: 'Made' object has no attribute 'nothing'"),
    "nothing": (lambda self, rng: None, "returned NoneType, not an AssistantMessage or a string"),
    "number": (lambda self, rng: 3, "returned int, not an AssistantMessage or a string"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_format_example_gets_wrong_is_told_with_its_class_and_what_to_do(bench, name):
    example, expected = WRONG[name]
    made = bench(type("Made", (Letters,), {"format_example": example}))
    with pytest.raises(relax.ConfigError, match="the format warm-up had no usable episode") as caught:
        await warmed_up(made)
    told = str(caught.value)
    assert f"format_example of Made {expected}" in told and "leave it out, or set warmup.steps = 0" in told
    assert sum(made.worker.stats().failures.values()) == 2, "they are counted where the run shows failures"


async def test_a_warm_up_can_be_stopped_while_an_example_or_a_row_is_slow(bench):
    """Both are asked for in threads, so the event loop is free to hear of a stop."""
    reached, let_go = threading.Event(), threading.Event()

    def slow(value):
        reached.set()
        assert let_go.wait(20), "the event loop was not free"
        return value

    class Slow(Letters):
        def format_example(self, rng):
            return slow("x")

    def rows():
        while True:
            yield slow({"index": 0})

    for made in (bench(Slow), bench(Letters, tasks=rows)):
        reached.clear(), let_go.clear()
        playing = asyncio.create_task(make_warmup(made.worker, 1, 4))
        await until(reached.is_set)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await made.worker.close()
        assert not made.worker.context.tasks
        let_go.set()


@pytest.mark.parametrize("env", [Letters, type("Plain", (relax.Env,), {})])
def test_whether_there_are_examples_is_told_before_any_reset(env):
    assert gives_examples(env) is (env is Letters)

"""Episodes and their engine: seeds, aborts, refusals and time-outs of its answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from episode_envs import Count, only
from relax_server.rollout.episode import Episode
from relax_server.rollout.task import EpisodeTask
from rollout_bench import until

from relax_sdk import EngineAborted, EngineError, SamplingParams, Status


async def test_cancelling_aborts_the_generation_in_flight(bench):
    made = bench(Count)
    made.engine.hold.clear()
    task = EpisodeTask("train", 3, {"index": 3}, "run/train/3", 0, 1, 5, 0, SamplingParams())
    episode = Episode(made.worker.context, task)
    result = episode.launch()
    await until(lambda: bool(made.engine.running))
    (rid,) = made.engine.running
    episode.cancel()
    trajectory = await result
    assert trajectory.status is Status.CANCELLED and "cancelled" in trajectory.error
    await until(lambda: made.engine.aborted == [rid])
    assert made.worker.stats().failures == {}, "cancelling is no failure"


async def test_a_turn_that_was_aborted_from_outside_is_sent_again(bench):
    made = bench(Count)
    made.engine.hold.clear()
    playing = asyncio.create_task(made.group())
    await until(lambda: bool(made.engine.running))
    await made.engine.abort(None)
    await until(lambda: len(made.engine.requests) == 2)
    made.engine.hold.set()
    result = await playing
    assert result.trajectories[0].status is Status.COMPLETED
    first, second = made.engine.requests
    assert first.input_ids == second.input_ids and first.rid != second.rid


async def test_an_engine_that_always_aborts_ends_the_episode_as_cancelled(bench):
    trajectory, made = await only(bench, Count, lambda request: EngineAborted("paused"), turn_timeout=0.1)
    assert trajectory.status is Status.CANCELLED and "times from outside within 0.1 s" in trajectory.error
    assert made.worker.stats().failures == {"EngineAborted": 1}


async def test_an_engine_that_refuses_fails_the_episode(bench):
    trajectory, _ = await only(bench, Count, lambda request: EngineError("context too long"))
    assert trajectory.status is Status.FAILED and trajectory.error.endswith("turn 0, generate: context too long")


async def test_an_engine_that_does_not_answer_times_out(bench):
    made = bench(Count, turn_timeout=0.05, max_retries=0)
    made.engine.hold.clear()
    trajectory = (await made.group()).trajectories[0]
    assert trajectory.status is Status.TIMED_OUT and "did not answer within 0.05 s" in trajectory.error


@pytest.mark.parametrize("own", [None, 3])
async def test_every_answer_has_a_seed_of_its_own_that_follows_from_the_run_and_is_recorded(bench, own):
    async def played(seed, **changes):
        sampling = SamplingParams(max_new_tokens=32, sampling_seed=own)
        made = bench(Count, kwargs={"turns": 2}, group_size=2, run_config={"seed": seed, "sampling": sampling})
        group = (await made.group(**changes)).group
        asked = {(r.rid.split("/")[-3], r.rid.split("/")[-2]): r.sampling.sampling_seed for r in made.engine.requests}
        for t in group.trajectories:
            assert [turn.sampling.sampling_seed for turn in t.turns] == [asked[str(t.group_index), str(i)] for i in range(2)]
            assert {turn.sampling.max_new_tokens for turn in t.turns} == {32}
        return asked

    first = await played(0)
    assert len(set(first.values())) == 4 and all(0 <= seed < 2**31 for seed in first.values())
    assert await played(0) == first
    assert (await played(1) == first) is (own is not None)
    assert set((await played(0, task_index=1)).values()).isdisjoint(first.values())


async def test_another_attempt_is_sampled_anew(bench):
    class Picky(Count):
        def step(self, action):
            if not seeds:
                seeds.append(None)
                raise ValueError("not that one")
            return super().step(action)

    seeds = []
    trajectory, made = await only(bench, Picky, kwargs={"turns": 1}, max_retries=1)
    assert trajectory.attempts == 2
    assert len({r.sampling.sampling_seed for r in made.engine.requests}) == 2


async def test_an_engine_that_takes_no_seeds_is_not_recorded_as_if_it_had(bench):
    made = bench(Count, kwargs={"turns": 1})
    generation = made.engine._generation
    made.engine._generation = lambda *args: replace(generation(*args), seeded=False)
    (trajectory,) = (await made.group()).group.trajectories
    assert [turn.sampling.sampling_seed for turn in trajectory.turns] == [None]

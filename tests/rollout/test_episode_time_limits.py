"""Episodes whose environments hang: stages and whole episodes time out, and what counts as time."""

from __future__ import annotations

import asyncio
import threading

import pytest
from episode_envs import Count, env_with, only
from relax_server.rollout.episode import Episode
from relax_server.rollout.task import EpisodeTask
from rollout_bench import until

import relax_sdk as relax
from relax_sdk import SamplingParams, Status

HANG = threading.Event()
"""Never set while a test needs it hanging."""


@pytest.fixture(autouse=True)
def let_hanging_threads_go():
    HANG.clear()
    yield
    HANG.set()


class AsyncHang(Count):
    async def step(self, action):
        await asyncio.Event().wait()


class IgnoresCancel(Count):
    """Swallows its cancellation, then returns in its own time."""

    async def step(self, action):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return super().step(action)


HANGING = {
    "reset": (env_with(reset=lambda self, **_: HANG.wait()), dict(reset_timeout=0.05), "reset: took longer than 0.05 s"),
    "step": (env_with(step=lambda self, _: HANG.wait()), dict(step_timeout=0.05), "step: took longer than 0.05 s"),
    "async step": (AsyncHang, dict(step_timeout=0.05), "step: took longer than 0.05 s"),
    "swallowed": (IgnoresCancel, dict(step_timeout=0.05), "step: took longer than 0.05 s"),
    "score": (
        env_with(r=relax.reward(lambda self, _: HANG.wait())),
        dict(score_timeout=0.05),
        "score: took longer than 0.05 s",
    ),
    "episode": (AsyncHang, dict(episode_timeout=0.05), "episode: took longer than 0.05 s"),
    "episode swallowed": (IgnoresCancel, dict(episode_timeout=0.05), "episode: took longer than 0.05 s"),
    "episode in a thread": (env_with(step=lambda self, _: HANG.wait()), dict(episode_timeout=0.05), "episode: took longer"),
}


@pytest.mark.parametrize("name", HANGING)
async def test_a_stage_that_hangs_times_out(bench, name):
    env, limits, expected = HANGING[name]
    trajectory, made = await only(bench, env, **limits)
    assert trajectory.status is Status.TIMED_OUT and expected in trajectory.error
    assert made.worker.stats().failures == {"EpisodeTimeout": 1}


async def test_threads_that_hang_do_not_use_up_the_pool(bench):
    made = bench(env_with(step=lambda self, _: HANG.wait()), group_size=300, step_timeout=0.2, max_retries=0)
    result = await made.group()
    assert {t.status for t in result.trajectories} == {Status.TIMED_OUT}
    stats = made.worker.stats()
    assert stats.threads_given_up == stats.threads_stuck == 300
    made.worker.context.env_class = Count
    assert (await made.group(1)).group is not None
    HANG.set()
    await until(lambda: made.worker.stats().threads_stuck == 0)


async def test_an_environment_that_cannot_be_cancelled_is_left_behind(bench, monkeypatch):
    monkeypatch.setattr("relax_server.rollout.episode.GRACE", 0.05)
    let_go = asyncio.Event()

    class Stubborn(Count):
        async def step(self, action):
            while not let_go.is_set():
                try:
                    await let_go.wait()
                except asyncio.CancelledError:
                    continue
            return super().step(action)

    trajectory, made = await only(bench, Stubborn, episode_timeout=0.05, concurrency=1)
    assert trajectory.status is Status.TIMED_OUT and "ignored its cancellation" in trajectory.error
    assert made.worker.stats().ignored_cancel == 1
    made.worker.context.env_class = Count
    assert (await made.group(1)).group is not None, "its slot must be free again"
    let_go.set()
    await until(lambda: not made.worker.context.tasks)


async def test_waiting_for_a_slot_counts_against_no_limit(bench):
    """Ten episodes of about 0.1 s one after another, each allowed 0.6 s."""

    class Slow(Count):
        async def step(self, action):
            await asyncio.sleep(0.1)
            return super().step(action)

    made = bench(Slow, group_size=10, concurrency=1, episode_timeout=0.6, max_retries=0)
    result = await made.group()
    assert {t.status for t in result.trajectories} == {Status.COMPLETED}
    assert max(t.timings["queued"] for t in result.trajectories) > 0.6


async def test_time_behind_a_pause_stays_excluded_when_it_is_over(bench):
    made = bench(Count)
    made.worker.pause()
    episode = Episode(made.worker.context, EpisodeTask("train", 3, {"index": 3}, "run/train/3", 0, 1, 5, 0, SamplingParams()))
    result = episode.launch()
    await until(lambda: episode.state == "running")
    await asyncio.sleep(0.1)
    during = episode.session.excluded
    made.worker.resume()
    assert (await result).status is Status.COMPLETED
    assert during >= 0.09 and episode.session.excluded >= during

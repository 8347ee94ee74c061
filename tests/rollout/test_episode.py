"""Episodes: what is recorded, where plain methods run, and limits on turns and tokens."""

from __future__ import annotations

import asyncio
import threading

import pytest
from episode_envs import Count, env_with, only, returning
from relax_server.rollout import session

import relax_sdk as relax
from relax_sdk import Status
from relax_sdk.trajectory import derive_seed


async def test_an_episode_leaves_tokens_messages_rewards_seed_and_times(bench, processor):
    trajectory, made = await only(bench, Count, "A", kwargs={"turns": 2})
    assert trajectory.status is Status.COMPLETED and trajectory.error is None
    assert [m["role"] for m in trajectory.messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [m["content"] for m in trajectory.messages] == ["count", "task 7", "A", "turn 1", "A", "turn 2"]
    assert (
        trajectory.reward == 1.0 and trajectory.rewards == {"env": 1.0} and [t.reward for t in trajectory.turns] == [0.5, 0.5]
    )
    assert trajectory.seed == derive_seed(0, "train", 7)
    assert trajectory.info == {"seen": 2}
    assert set(trajectory.timings) == {"queued", "reset", "generate", "step", "score", "total"}
    assert trajectory.turns[0].engine == made.engine.url
    text = processor.decode(trajectory.turns[1].prompt_ids + trajectory.turns[1].response_ids)
    assert text == (
        "<|im_start|>system\ncount<|im_end|>\n<|im_start|>user\ntask 7<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nturn 1<|im_end|>\n<|im_start|>assistant\nA<|im_end|>"
    )
    assert len(trajectory.samples()) == 1


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
async def test_plain_methods_run_in_a_thread_unless_the_class_says_they_are_quick(bench, blocking, asynchronous):
    places = []

    def note():
        places.append(threading.current_thread() is threading.main_thread())

    class Plain(Count):
        def reset(self, *, seed=None, options=None):
            note()
            return super().reset(seed=seed, options=options)

        def step(self, action):
            note()
            return super().step(action)

        @relax.reward
        def bonus(self, trajectory):
            note()
            return 1.0

    class Async(Count):
        async def reset(self, *, seed=None, options=None):
            await asyncio.sleep(0)
            note()
            return super().reset(seed=seed, options=options)

        async def step(self, action):
            await asyncio.sleep(0)
            note()
            return super().step(action)

        @relax.reward
        async def bonus(self, trajectory):
            note()
            return 1.0

    env = Async if asynchronous else Plain
    env.blocking = blocking
    trajectory, _ = await only(bench, env)
    assert (
        trajectory.status is Status.COMPLETED and trajectory.rewards == {"env": 0.5, "bonus": 1.0} and trajectory.reward == 1.5
    )
    assert places == [asynchronous or not blocking] * 3


async def test_an_episode_with_too_many_turns_is_truncated_and_scored(bench):
    trajectory, _ = await only(bench, Count, kwargs={"turns": 99}, max_turns=3)
    assert trajectory.status is Status.TRUNCATED and len(trajectory.turns) == 3 and trajectory.reward == 1.5


async def test_an_episode_that_holds_too_many_tokens_is_over(bench, monkeypatch):
    monkeypatch.setattr(session, "MOST_IDS", 150)
    trajectory, _ = await only(bench, Count, kwargs={"turns": 99}, max_turns=50)
    held = [len(turn.prompt_ids) + len(turn.response_ids) for turn in trajectory.turns]
    assert trajectory.status is Status.TRUNCATED and sum(held[:-1]) < 150 <= sum(held) and trajectory.reward


async def test_the_environment_can_truncate(bench):
    trajectory, _ = await only(bench, env_with(step=returning((None, 1, False, True, {}))))
    assert trajectory.status is Status.TRUNCATED and trajectory.reward == 1.0


async def test_the_token_limit_shortens_the_last_answer_and_then_truncates(bench):
    """The answer is ten tokens; prompts grow until less than ten are left, then none."""
    trajectory, made = await only(bench, Count, "123456789", kwargs={"turns": 99}, max_tokens=200)
    assert trajectory.status is Status.TRUNCATED
    assert all(len(t.prompt_ids) + len(t.response_ids) <= 200 for t in trajectory.turns)
    room = 200 - len(trajectory.turns[-1].prompt_ids)
    assert made.engine.requests[-1].sampling.max_new_tokens == min(room, 32)
    sent = len(made.engine.requests)
    assert sent == len(trajectory.turns) > 2


async def test_a_first_prompt_that_leaves_no_room_is_an_error_with_both_numbers(bench):
    trajectory, _ = await only(bench, Count, max_tokens=20)
    assert trajectory.status is Status.FAILED and "the first prompt has 40 tokens; max_tokens is 20" in trajectory.error

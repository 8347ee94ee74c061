"""Episodes of environments that do something wrong: what is told of it, and where it was."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from episode_envs import Count, env_with, only, raising, returning
from rollout_bench import until

import relax_sdk as relax
from relax_sdk import Status

BAD_ENVIRONMENTS = {
    "reset raises": (dict(reset=raising(KeyError("boom"))), "turn 0, reset: raised KeyError: 'boom'"),
    "reset exits": (dict(reset=raising(SystemExit(1))), "reset: raised SystemExit"),
    "reset cancels itself": (dict(reset=raising(asyncio.CancelledError())), "reset: raised CancelledError"),
    "reset returns one thing": (dict(reset=returning("hello")), r"reset must return \(observation, info\), got str"),
    "reset returns three": (dict(reset=returning(("a", {}, 1))), "got a tuple of 3"),
    "reset returns nothing": (dict(reset=returning((None, {}))), "reset returned no observation"),
    "reset info": (dict(reset=returning(("a", [1]))), "info of reset must be a dictionary, got list"),
    "observation number": (dict(reset=returning((3.5, {}))), "an observation must be .* got float"),
    "observation holds a set": (dict(reset=returning((["a", {1}], {}))), "an observation may hold .* got set"),
    "message without role": (dict(reset=returning(({"content": "a"}, {}))), "role"),
    "step raises": (dict(step=raising(ZeroDivisionError("by 0"))), "turn 1, step: raised ZeroDivisionError: by 0"),
    "step times out by itself": (dict(step=raising(TimeoutError("socket"))), "step: raised TimeoutError: socket"),
    "step returns four": (dict(step=returning((None, 0.0, True, {}))), "step must return .* got a tuple of 4"),
    "reward nan": (dict(step=returning((None, float("nan"), True, False, {}))), "the reward of step is nan; it must be finite"),
    "reward inf": (dict(step=returning((None, np.float32("inf"), True, False, {}))), "the reward of step is inf"),
    "reward text": (dict(step=returning((None, "1.0", True, False, {}))), "reward of step must be a number, got str"),
    "reward none": (dict(step=returning((None, None, True, False, {}))), "reward of step must be a number, got NoneType"),
    "terminated is 1": (dict(step=returning((None, 0.0, 1, False, {}))), "terminated must be a bool, got int"),
    "truncated is None": (dict(step=returning((None, 0.0, True, None, {}))), "truncated must be a bool, got NoneType"),
    "info is None": (dict(step=returning((None, 0.0, True, False, None))), "info of step must be a dictionary, got NoneType"),
    "no observation": (dict(step=returning((None, 0.0, False, False, {}))), "must return an observation or end the episode"),
    "placeholder": (dict(reset=returning(("<|image_pad|>", {}))), "must not contain placeholder tokens"),
    "constructor": (dict(__init__=raising(OSError("no display"))), "reset: raised OSError: no display"),
    "reward function raises": (dict(r=relax.reward(raising(ValueError("x")))), "score: reward .* raised ValueError: x"),
    "reward function nan": (dict(r=relax.reward(returning(float("nan")))), "score: reward 'r' is nan"),
}


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("name", BAD_ENVIRONMENTS)
async def test_what_an_environment_gets_wrong_is_told_with_its_place(bench, name, blocking):
    methods, expected = BAD_ENVIRONMENTS[name]
    trajectory, made = await only(bench, env_with(**methods, blocking=blocking))
    assert trajectory.status is Status.FAILED
    assert trajectory.error.startswith("test-v0, train task 7, sample 0, turn ")
    with pytest.raises(AssertionError, match=expected):
        raise AssertionError(trajectory.error)
    assert trajectory.reward == 0.0 and sum(made.worker.stats().failures.values()) == 1


async def test_an_error_names_the_line_that_raised_it(bench):
    trajectory, _ = await only(bench, env_with(reset=raising(ValueError("x"))))
    assert "raised ValueError: x (episode_envs.py:" in trajectory.error


async def test_the_environment_of_a_gymnasium_wrapper_is_refused_by_name(bench):
    class Plain(gymnasium.Env):
        metadata: ClassVar[dict] = {}

    with pytest.raises(relax.RegistryError, match=r"not a subclass of relax_sdk\.Env"):
        bench(Plain)


async def test_close_is_called_however_the_episode_ends(bench):
    closed = []

    class Closing(Count):
        def step(self, action):
            if closed is not None and self.turns == 0:
                raise ValueError("x")
            return super().step(action)

        def close(self):
            closed.append(self)

    for turns in (0, 1):
        _, made = await only(bench, Closing, kwargs={"turns": turns})
        await until(lambda made=made: not made.worker.context.tasks)
    assert len(closed) == 2


async def test_a_close_that_fails_does_not_spoil_the_episode(bench):
    trajectory, made = await only(bench, env_with(close=raising(ValueError("stuck"))))
    await until(lambda: not made.worker.context.tasks)
    assert trajectory.status is Status.COMPLETED and made.worker.context.tally.closing == 1

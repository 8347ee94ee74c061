"""Episodes of agents that go their own ways."""

from __future__ import annotations

from typing import Any

import pytest
from episode_envs import Count, env_with, only, raising

import relax_sdk as relax
from relax_sdk import Status


class Agents:
    """Agents that go their own ways."""

    @staticmethod
    async def lazy(session):
        await session.reset()

    @staticmethod
    async def impatient(session):
        await session.generate([relax.Message("user", (relax.Text("hi"),))])

    @staticmethod
    async def early(session):
        await session.generate(await session.reset())

    @staticmethod
    async def swallows(session):
        messages = await session.reset()
        while True:
            try:
                await session.step(await session.generate(messages))
            except relax.RelaxError:
                continue

    @staticmethod
    async def buggy(session):
        await session.reset()
        raise IndexError("mine")

    @staticmethod
    async def goes_on(session):
        action = await session.generate(await session.reset())
        await session.step(action)
        await session.step(action)


@pytest.mark.parametrize(
    "agent, status, expected",
    [
        (Agents.lazy, Status.FAILED, "the agent returned without asking the policy"),
        (Agents.impatient, Status.FAILED, "call reset first"),
        (Agents.early, Status.TRUNCATED, None),
        (Agents.buggy, Status.FAILED, "agent: raised IndexError: mine"),
        (Agents.goes_on, Status.FAILED, "the agent acts though the episode is over"),
        (Agents.swallows, Status.TIMED_OUT, "episode: took longer than 0.3 s"),
    ],
)
async def test_agents_that_go_their_own_ways(bench, agent, status, expected):
    trajectory, _ = await only(bench, Count, agent=agent, episode_timeout=0.3)
    assert trajectory.status is status
    assert trajectory.error is None if expected is None else expected in trajectory.error


async def test_an_agent_that_swallows_an_error_cannot_hide_it(bench):
    async def hides(session):
        messages = await session.reset()
        action = await session.generate(messages)
        try:
            await session.step(action)
        except relax.EnvError:
            return

    trajectory, _ = await only(bench, env_with(step=raising(ValueError("x"))), agent=hides)
    assert trajectory.status is Status.FAILED and "step: raised ValueError" in trajectory.error


async def test_an_agent_that_rewrites_history_begins_a_new_training_sequence(bench):
    async def summarises(session):
        messages = await session.reset()
        action = await session.generate(messages)
        outcome = await session.step(action)
        await session.generate([relax.Message("user", (relax.Text("in short"),)), *outcome.observation])

    trajectory, _ = await only(bench, Count, agent=summarises, kwargs={"turns": 3})
    samples = trajectory.samples()
    assert len(trajectory.turns) == len(samples) == 2
    assert [m["content"] for m in trajectory.messages] == ["in short", "turn 1", "A"]


class Letters(Count):
    """Pays for the length of the text."""

    def __init__(self) -> None:
        super().__init__(turns=2)
        self.told: list[Any] = []

    def step(self, action):
        self.told += [f"{token.token} at {token.at}" for token in action.control_tokens]
        observation, _, *ends, info = super().step(action)
        return observation, float(len(action.text)), *ends, info | {"told": self.told}


@pytest.mark.parametrize("dropped", [False, True])
async def test_tokens_that_are_no_text_earn_nothing_and_are_told(bench, dropped):
    """Also where an agent gives back its messages as plain OpenAI messages, which know no control tokens."""

    async def agent(session):
        messages = await session.reset()
        while True:
            action = await session.generate(messages)
            outcome = await session.step(action)
            if outcome.done:
                return
            sent = action.to_openai()
            if dropped:
                del sent["control_tokens"]
            messages += [relax.Message.from_openai(sent), *outcome.observation]

    trajectory, _ = await only(bench, Letters, "ab" + "</tool_call>" * 6, agent=agent)
    assert trajectory.status is Status.COMPLETED and trajectory.reward == 4.0
    assert trajectory.info["told"] == ["</tool_call> at 2"] * 12
    assert [m["content"] for m in trajectory.messages if m["role"] == "assistant"] == ["ab", "ab"]
    assert len(trajectory.samples()) == 1, "the recorded tokens are gone on from"

"""`Session`: one episode as an agent sees it. An agent is any `async def agent(session)`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from relax_sdk.messages import AssistantMessage, Message


@dataclass(frozen=True)
class StepOutcome:
    """The environment's answer to an action."""

    observation: list[Message] = field(default_factory=list)
    """New messages; empty when there are none."""
    reward: float = 0.0
    terminated: bool = False
    """The task is over."""
    truncated: bool = False
    """It was cut short."""
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether the episode has ended."""
        return self.terminated or self.truncated


class Session(Protocol):
    """One episode: an environment to act in and a policy to ask.

    `reset` comes first, once. Then `generate` asks the policy, and `step` or `call_tools` carries its action out, until
    `StepOutcome.done`. What the policy was sent and what it answered is recorded token by token; an agent that passes on
    the messages it has seen, with new ones behind them, keeps the whole episode one training sequence.

    Every method raises an `EpisodeError` that names environment, task and turn when the environment fails or passes a time
    limit, and `EpisodeOver` when the episode's limit on turns or tokens is reached. Agents let both pass.
    """

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """OpenAI schemas of the environment's tools; the policy is told of them."""
        ...

    @property
    def done(self) -> bool:
        """Whether the environment has ended the episode."""
        ...

    async def reset(self) -> list[Message]:
        """Begin the episode: the first observation, the environment's system prompt in front of it."""
        ...

    async def generate(self, messages: Sequence[Message]) -> AssistantMessage:
        """Ask the policy for the message that follows `messages`; the last of them must not be the assistant's."""
        ...

    async def step(self, action: AssistantMessage) -> StepOutcome:
        """Act in the environment."""
        ...

    async def call_tools(self, action: AssistantMessage) -> StepOutcome:
        """Carry out the action's tool calls, in order; the observation holds one tool message for each.

        A call that cannot be read, an unknown tool or wrong arguments are answered to the policy as text.
        """
        ...


Agent: TypeAlias = Callable[[Session], Awaitable[None]]
"""Plays one episode; the episode is over when it returns."""

"""The interface: `Policy` answers the messages of one episode, `Policies` makes one for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from relax_sdk.messages import Message
from relax_sdk.trajectory import Trajectory, Turn
from relax_server.rollout.calls import Answer, CallOptions
from relax_server.rollout.environment import EnvRunner


class Policy(ABC):
    """Answers the messages of one episode."""

    @property
    @abstractmethod
    def turns(self) -> list[Turn]:
        """All answers so far, as recorded."""

    @property
    def info(self) -> dict[str, Any]:
        """Facts about the answers that are kept with the trajectory's `info`."""
        return {}

    @abstractmethod
    async def ask(self, messages: Sequence[Message], options: CallOptions) -> Answer:
        """Answer a conversation; several calls may be under way at once.

        Args:
            messages: the conversation; the last one must not be the assistant's.
            options: what the agent asks for.

        Raises:
            EpisodeOver: the episode's limit on tokens is reached.
            EpisodeError: there is nothing to answer.
            TokenError, MediaError: the messages do not fit the model.
            EngineError, EpisodeTimeout: no answer could be had.
        """

    async def keep(self, messages: Sequence[Message]) -> list[Message]:
        """The same messages, their media where this policy will read them.

        Raises:
            MediaError: damaged, unreadable, or they cannot be stored.
            EpisodeTimeout: that took too long.
        """
        return list(messages)


class Policies(ABC):
    """What the policies of all episodes share."""

    @abstractmethod
    def of(self, runner: EnvRunner) -> Policy:
        """A policy for one episode, whose environment was just reset."""

    @abstractmethod
    def answered(self, trajectory: Trajectory) -> bool:
        """Whether a trajectory holds an answer, so that it is of use."""

    def release(self, group_id: str) -> None:
        """A group is over: what was kept for its calls may go."""
        return

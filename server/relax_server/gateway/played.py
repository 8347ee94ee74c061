"""An episode that is played over HTTP, whoever it is played for."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol

from relax_sdk.config import SamplingParams
from relax_sdk.media import Kind, MediaRef
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.session import StepOutcome
from relax_server.gateway.bodies import RewardBody
from relax_server.gateway.digest import digest
from relax_server.gateway.errors import ApiError, bad
from relax_server.models.processor import Processor
from relax_server.rollout.calls import Answer, CallOptions
from relax_server.rollout.fair_threads import KeyThreads
from relax_server.rollout.session import EpisodeSession
from relax_server.rollout.threads import CallThreads

MOST_REWARDS = 256
"""Rewards of one session that come from outside."""


class Surroundings(Protocol):
    """What the routes of a session need around it."""

    processor: Processor
    media_threads: CallThreads
    max_body: int
    """Bytes of a request."""

    async def media_ref(self, sha256: str, kind: Kind | None = None) -> MediaRef | None:
        """The reference of a stored item, as `MediaStore.find` gives it; None: not here."""
        ...

    async def take_media(self, kind: Kind, data: bytes, owner: str) -> MediaRef:
        """Check an item and store it.

        Args:
            kind: what it is to be.
            data: encoded.
            owner: id of the key that it came with.

        Raises:
            MediaError: refused.
        """
        ...


class PlayedSession(ABC):
    """One episode that is played over HTTP.

    Args:
        id: of the session.
        secret: the session's own key.
        session: the episode, as an agent sees it.
        sampling: where a request says nothing.
        fixed: temperature, top_p and top_k are those of `sampling` whatever a request says, as in training.
        work: threads for large requests, shared fairly with other keys.
    """

    def __init__(
        self, id: str, secret: str, session: EpisodeSession, sampling: SamplingParams, fixed: bool, work: KeyThreads
    ) -> None:
        self.id, self.session, self.sampling, self.fixed, self.work = id, session, sampling, fixed, work
        self.secret = digest(secret)
        """Hashed."""
        self.responses: dict[str, list[Message]] = {}
        """Conversations by the id of the response that ended them."""
        self.media_form = "reference"
        """How observations name media."""
        self.owner = ""
        """Id of the key that the session's work is counted for; empty where there are none."""
        self.ended = asyncio.Event()
        """The agent has said that it is done."""
        self.calls = 0
        """Under way."""
        self._at_work: set[asyncio.Task[Any]] = set()
        """That the calls are made in."""
        self._interrupted: str | None = None
        self.idle_since = time.monotonic()

    @abstractmethod
    def require_open(self) -> None:
        """Raise if the session is over.

        Raises:
            ApiError: it is; the message says how it ended.
        """

    @abstractmethod
    async def finish(self) -> dict[str, Any]:
        """End the episode; returns what the agent is told.

        Raises:
            ApiError: there was no model call yet, it was cancelled, or it could not be stored.
        """

    @property
    def trajectory_id(self) -> str:
        """Id of the trajectory that this session becomes."""
        return self.session.task.id

    def opens_with(self, secret: str) -> bool:
        """Whether this is the session's own key."""
        return hmac.compare_digest(self.secret, digest(secret))

    async def generate(self, messages: list[Message], options: CallOptions) -> Answer:
        """One model call.

        Raises:
            ApiError: the session is over.
            RelaxError: as `EpisodeSession.call`.
        """
        self.require_open()
        with self.busy():
            return await self.session.call(messages, options)

    async def step(self, action: AssistantMessage) -> StepOutcome:
        """Act in the environment; tool calls go to its tools.

        Raises:
            ApiError: the session is over.
            EpisodeError: the environment failed.
        """
        self.require_open()
        if not self.session.context.observes:
            raise bad("this session has no environment to act in; post its reward and finish it", code="no_environment")
        tools = action.tool_calls and self.session.tools
        with self.busy():
            return await (self.session.call_tools(action) if tools else self.session.step(action))

    def reward(self, body: RewardBody) -> dict[str, Any]:
        """Add a component to the reward, or replace one that was set before; returns what the agent is told.

        Raises:
            ApiError: the name is the environment's, there are too many or too large ones, or the session is over.
        """
        self.require_open()
        if body.name == "env":
            raise bad("a reward's name must be another than 'env', which is what the environment gives", "name")
        rewards = self.session.extra_rewards | {body.name: body.value}
        if len(rewards) > MOST_REWARDS:
            raise bad(f"a session has at most {MOST_REWARDS} rewards from outside; replace one of them", "name")
        if not math.isfinite(sum(rewards.values())):
            raise bad("the rewards of the session add up to more than a float holds", "value")
        self.session.extra_rewards[body.name] = body.value
        return {"name": body.name, "value": body.value}

    def end(self) -> None:
        """Let the episode be scored.

        Raises:
            ApiError: there was no model call yet.
        """
        session = self.session
        if not session.turns:
            raise bad("the session has no model call yet; make one, or cancel it with DELETE", code="no_turns")
        if not session.context.observes and session.outcome is not None:
            session.outcome = dataclasses.replace(session.outcome, terminated=True)  # only the agent knows, and it says so
        self.ended.set()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Something is being done for the agent.

        Raises:
            ApiError: the session was interrupted meanwhile.
        """
        task = asyncio.current_task()
        assert task is not None
        self.calls += 1
        self._at_work.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._interrupted is None or task.uncancel():
                raise
            raise over(self.id, self._interrupted) from None
        finally:
            self._at_work.discard(task)
            self.calls -= 1
            self.idle_since = time.monotonic()

    def interrupt(self, why: str) -> None:
        """Abort the calls that are under way; they are answered with the reason."""
        self._interrupted = why
        for task in self._at_work:
            task.cancel()


def over(id: str, how: str) -> ApiError:
    """A request to a session that has ended."""
    return ApiError(400, f"session {id} is over ({how}); open a new one", "episode_over")


__all__ = ["PlayedSession", "Surroundings", "over"]

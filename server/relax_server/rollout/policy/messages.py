"""Policies behind an OpenAI-compatible URL: messages in, messages out, no token ids; for evaluation only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from relax_sdk.errors import EpisodeError
from relax_sdk.media import MediaStore
from relax_sdk.messages import Message
from relax_sdk.trajectory import Trajectory, Turn
from relax_server.engines.openai import ChatClient
from relax_server.rollout.calls import Answer, CallOptions
from relax_server.rollout.environment import EnvRunner
from relax_server.rollout.policy.base import Policies, Policy


class TokenlessPolicy(Policy):
    """One episode's policy by messages alone; the token ids of its turns are unknown, and empty in the trajectory.

    Args:
        runner: of the episode's environment.
        store: media go here; None: nowhere.
    """

    def __init__(self, runner: EnvRunner, store: MediaStore | None = None) -> None:
        self._runner, self._store = runner, store
        self._turns: list[Turn] = []

    @property
    def turns(self) -> list[Turn]:
        """All answers so far, without tokens."""
        return self._turns

    async def keep(self, messages: Sequence[Message]) -> list[Message]:
        store, context = self._store, self._runner.context
        if store is None or not any(message.media for message in messages):
            return list(messages)

        def put() -> list[Message]:
            return [message.map_media(lambda part: store.load(store.put(part))) for message in messages]

        return await context.threads.call(put, limit=context.config.step_timeout)


class MessagePolicy(TokenlessPolicy):
    """One episode's policy, asked by messages.

    Args:
        client: of the endpoint.
        runner: of the episode's environment.
        store: media go here; None: nowhere.
    """

    def __init__(self, client: ChatClient, runner: EnvRunner, store: MediaStore | None = None) -> None:
        super().__init__(runner, store)
        self._client = client

    @property
    def info(self) -> dict[str, Any]:
        """Why there are no tokens."""
        return {"tokens": f"unknown: played with {self._client.endpoint.model} at {self._client.endpoint.url}"}

    async def ask(self, messages: Sequence[Message], options: CallOptions) -> Answer:
        if options.on_partial is not None:
            raise EpisodeError(f"{self._client.endpoint.url} is asked for whole answers only, not for streams of tokens")
        config, started = self._runner.context.config, time.monotonic()
        task, own = self._runner.task, options.sampling
        sampling = task.sampling_at(len(self._turns), config.max_tokens, own)
        if (own or task.sampling).sampling_seed is None:  # nobody asked for one, and not every server knows the word
            sampling = sampling.with_seed(None)
        tools = options.tools if options.tools is not None else self._runner.tools[0]
        message = await self._client.ask(messages, tools, sampling, config.turn_timeout)
        media = [item.ref for asked in messages for item in asked.media]
        turn = Turn([], [], [], finish_reason=message.finish_reason, media=media, engine=self._client.endpoint.url)
        turn.sampling, turn.unreadable_calls = sampling, message.unreadable_calls
        turn.seconds = time.monotonic() - started
        self._turns.append(turn)
        if options.shown is not None:
            message = options.shown(message, turn)
        return Answer(message, turn, list(messages))


class MessagePolicies(Policies):
    """Policies that one endpoint answers for.

    Args:
        client: of the endpoint.
        store: media go here; None: nowhere.
    """

    def __init__(self, client: ChatClient, store: MediaStore | None = None) -> None:
        self._client, self._store = client, store

    def of(self, runner: EnvRunner) -> Policy:
        return MessagePolicy(self._client, runner, self._store)

    def answered(self, trajectory: Trajectory) -> bool:
        return bool(trajectory.turns)

"""Policies that answer with tokens: every prompt and response is recorded, so that a response is never encoded again."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relax_sdk.config import SamplingParams
from relax_sdk.errors import EngineAborted, EngineError, EpisodeOver, TokenError
from relax_sdk.media import Media, MediaKey
from relax_sdk.messages import AssistantMessage, Message, Text
from relax_sdk.retrying import growing_pauses
from relax_sdk.trajectory import Trajectory, Turn
from relax_server.engines.base import GenerateRequest, Generation, MediaItem
from relax_server.rollout.calls import Answer, CallOptions, Meter
from relax_server.rollout.environment import EnvRunner
from relax_server.rollout.fair_threads import MESSAGE, SMALL, KeyThreads
from relax_server.rollout.media import MediaIntake, PreparedMedia
from relax_server.rollout.policy.base import Policies, Policy
from relax_server.rollout.pool import EnginePool, Listener
from relax_server.rollout.recorder import PromptPlan, RecordedPrompt, TokenRecorder
from relax_server.rollout.rendering import Renderer

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds before a turn that was aborted from outside is sent again: the first, and the longest."""


@dataclass(frozen=True)
class Sampled:
    """A response and where it came from."""

    generation: Generation
    engine: str
    """URL of the engine."""
    seconds: float
    """Seconds that the engine took."""
    sampling: SamplingParams | None = None
    """Sampling parameters that the engine was asked with; None where no engine was."""


class TokenPolicy(Policy):
    """Turns messages into a prompt, has a response sampled, records both, and reads the response as a message.

    Args:
        renderer: of the model.
        intake: takes the media of messages.
        tools: OpenAI schemas that the policy is offered.
        tools_key: names `tools`.
        max_tokens: of a prompt and its response together.
        work: threads that large conversations are rendered in; default: the event loop.
    """

    def __init__(
        self,
        renderer: Renderer,
        intake: MediaIntake,
        tools: Sequence[dict[str, Any]] = (),
        tools_key: str = "",
        max_tokens: int = sys.maxsize,
        work: KeyThreads | None = None,
    ) -> None:
        self.recorder = TokenRecorder(renderer, tools, tools_key)
        self.max_tokens = max_tokens
        self._work = work
        self._intake = intake
        self._media: dict[MediaKey, PreparedMedia] = {}

    @property
    def turns(self) -> list[Turn]:
        """All answers so far, as recorded."""
        return self.recorder.turns

    @abstractmethod
    async def sample(self, prompt: RecordedPrompt, media: tuple[MediaItem, ...], room: int, options: CallOptions) -> Sampled:
        """A response to a prompt.

        Args:
            prompt: in wire form and expanded.
            media: of the placeholders, in order.
            room: tokens that the response may have.
            options: what the agent asks for.

        Raises:
            EngineError, EpisodeTimeout: there is none.
        """

    async def ask(self, messages: Sequence[Message], options: CallOptions) -> Answer:
        recorder = self.recorder
        plan = await self._plan(messages, options)
        prepared = await self._take(plan.new_media)
        prompt = recorder.prompt(plan, [item.features for item in prepared if item.features is not None])
        room = self._require_room(len(prompt.expanded), self.max_tokens)
        media = [self._media[item.ref.key] for item in prompt.media]
        sampled = await self.sample(prompt, tuple(item.item for item in media), room, options)
        refs, fps = [item.ref for item in media], recorder.processor.shown_fps([item.features for item in media])
        turn = recorder.record(prompt, sampled.generation, refs, sampled.engine, sampled.seconds, sampled.sampling, fps)
        return Answer(recorder.answer(plan, prompt, turn, options.shown), turn, prompt.messages)

    async def _plan(self, messages: Sequence[Message], options: CallOptions) -> PromptPlan:
        """The prompt of a call; a conversation that cannot fit is refused before any of it is rendered."""
        bounds = self.recorder.processor.bounds
        characters, most = options.size, min(self.max_tokens, bounds.context)
        if not 0 < options.size <= SMALL:  # what is small is soon rendered, and its tokens are counted below
            characters = _characters(messages)
            self._require_room(bounds.fewest_tokens(characters), most, "at least ")
        asked = await self.keep(messages), options.tools, options.tools_key
        size = max(characters, options.size, MESSAGE * len(messages))
        if self._work is None or size <= SMALL:
            plan = self.recorder.plan(*asked)
        else:
            plan = await self._work.call(0, self.recorder.plan, *asked)
        wire = len(plan.base_ids) + (len(plan.piece.ids) if plan.piece is not None else 0)
        self._require_room(wire, most, "at least " if plan.new_media else "")
        return plan

    async def keep(self, messages: Sequence[Message]) -> list[Message]:
        """The same messages once their media are in the store, from where their bytes are read when they are wanted: a history
        that is kept, and sent again with every call, holds none."""
        media = [item for message in messages for item in message.media]
        if not media:
            return list(messages)
        await self._take(media)
        return [message.map_media(lambda item: self._media[item.ref.key].part) for message in messages]

    async def _take(self, media: Sequence[Media]) -> list[PreparedMedia]:
        if not media:
            return []
        prepared = await self._intake.take(media)
        self._media.update((item.ref.key, item) for item in prepared)
        return prepared

    def _require_room(self, tokens: int, most: int, about: str = "") -> int:
        """How many tokens may follow a prompt of so many, where `most` are allowed: `max_tokens`, or the model's positions.

        Raises:
            TokenError: none, and it is the first.
            EpisodeOver: none any more.
        """
        room = most - tokens
        limit = f"max_tokens is {most}" if most == self.max_tokens else f"the model has {most} positions"
        if room < 1 and not self.turns:
            raise TokenError(f"the first prompt has {about}{tokens} tokens; {limit}")
        if room < 1:
            raise EpisodeOver(f"the episode has reached its last token: {limit}")
        return room


class TokenPolicies(Policies):
    """Policies whose answers are tokens.

    Args:
        renderer: of the model.
        intake: takes the media of messages.
    """

    def __init__(self, renderer: Renderer, intake: MediaIntake) -> None:
        self.renderer, self.intake = renderer, intake

    def answered(self, trajectory: Trajectory) -> bool:
        return trajectory.n_response_tokens > 0


class EnginePolicies(TokenPolicies):
    """Policies that engines sample from.

    Args:
        renderer: of the model.
        intake: takes the media of messages.
        pool: of the engines.
        gate: set while calls may be sent.
        routed_experts: ask the engines for the experts they chose.
        work: threads that large conversations are rendered in; default: the event loop.
        meter: charged for the tokens of every call; None: nobody is.
    """

    def __init__(
        self,
        renderer: Renderer,
        intake: MediaIntake,
        pool: EnginePool,
        gate: asyncio.Event,
        routed_experts: bool = False,
        work: KeyThreads | None = None,
        meter: Meter | None = None,
    ) -> None:
        super().__init__(renderer, intake)
        self.pool, self.gate, self.routed_experts, self.work, self.meter = pool, gate, routed_experts, work, meter

    def of(self, runner: EnvRunner) -> Policy:
        return EnginePolicy(self, runner)

    def release(self, group_id: str) -> None:
        """Forget which engine a group's calls prefer."""
        self.pool.release(group_id)

    async def ask_once(
        self, messages: Sequence[Message], sampling: SamplingParams, timeout: float, key: str
    ) -> AssistantMessage:
        """Answer outside any episode, whether or not calls may be sent; nothing is kept of it.

        Args:
            messages: the conversation.
            sampling: as it is.
            timeout: seconds.
            key: names the call.

        Raises:
            MediaError, TokenError, EngineError, EpisodeTimeout: as in an episode.
        """
        policy = SingleCall(self, timeout, key)
        return (await policy.ask(messages, CallOptions(sampling))).message


class EnginePolicy(TokenPolicy):
    """One episode's policy, sampled by the engines of a pool.

    Args:
        shared: with the other episodes.
        runner: of the episode's environment.
    """

    def __init__(self, shared: EnginePolicies, runner: EnvRunner) -> None:
        super().__init__(shared.renderer, shared.intake, *runner.tools, runner.context.config.max_tokens, shared.work)
        self._shared, self._runner = shared, runner
        self._calls = itertools.count()

    async def sample(self, prompt: RecordedPrompt, media: tuple[MediaItem, ...], room: int, options: CallOptions) -> Sampled:
        """One answer; an answer that was aborted from outside is asked for again, unless part of it was told already."""
        task, limit = self._runner.task, self._runner.context.config.turn_timeout
        number = next(self._calls)
        listener = Listener(options.on_partial) if options.on_partial is not None else None
        sampling = task.sampling_at(number, room, options.sampling)
        routed, alone = self._shared.routed_experts, task.group_size == 1
        pauses, aborts, left = growing_pauses(FIRST_PAUSE, LONGEST_PAUSE), 0, limit
        while True:
            await self._may_send(sampling.max_new_tokens)
            started, used = time.monotonic(), sampling.max_new_tokens
            rid = f"{task.id}/{number}/{task.attempt}.{aborts}"
            request = GenerateRequest(prompt.ids, sampling, media, rid=rid, return_routed_experts=routed, alone=alone)
            try:
                generation, engine = await self._shared.pool.generate(request, left, task.group_id, listener)
                used = len(generation.response_ids)
            except EngineAborted:
                generation, engine, used = None, "", 0
            except EngineError:
                used = 0
                raise
            finally:  # a call that was given up, or took too long, is charged whole: nobody knows what it has generated
                self._give_back(sampling.max_new_tokens - used)
            seconds = time.monotonic() - started
            if generation is not None and generation.finish_reason != "abort":
                return Sampled(generation, engine, seconds, sampling)
            aborts += 1
            left -= seconds + (pause := next(pauses))
            if left <= 0 or (listener is not None and listener.heard):
                raise EngineAborted(f"the turn was aborted {aborts} times from outside within {limit:g} s")
            await asyncio.sleep(pause)

    async def _may_send(self, tokens: int) -> None:
        """Wait until a call may be sent, and charge it."""
        while True:
            await self._pass_gate()
            await self._reserve(tokens)
            if self._shared.gate.is_set():
                return
            self._give_back(tokens)  # it was closed while this one waited for tokens

    async def _pass_gate(self) -> None:
        gate = self._shared.gate
        if gate.is_set():
            return
        started = time.monotonic()
        with self._runner.clock.waits(lambda: time.monotonic() - started):
            await gate.wait()

    async def _reserve(self, tokens: int) -> None:
        if self._shared.meter is not None:
            started = time.monotonic()
            with self._runner.clock.waits(lambda: time.monotonic() - started):
                await self._shared.meter.reserve(tokens)

    def _give_back(self, tokens: int) -> None:
        if self._shared.meter is not None:
            self._shared.meter.give_back(tokens)


class SingleCall(TokenPolicy):
    """A policy that is asked once, outside any episode.

    Args:
        shared: with the episodes.
        timeout: seconds.
        key: names the call.
    """

    def __init__(self, shared: EnginePolicies, timeout: float, key: str) -> None:
        super().__init__(shared.renderer, shared.intake)
        self._pool, self._timeout, self._key = shared.pool, timeout, key

    async def sample(self, prompt: RecordedPrompt, media: tuple[MediaItem, ...], room: int, options: CallOptions) -> Sampled:
        assert options.sampling is not None
        request, started = GenerateRequest(prompt.ids, options.sampling, media, rid=self._key), time.monotonic()
        try:
            generation, url = await self._pool.generate(request, self._timeout, self._key)
        finally:
            self._pool.release(self._key)
        return Sampled(generation, url, time.monotonic() - started, options.sampling)


def _characters(messages: Sequence[Message]) -> int:
    """Characters of text in a conversation."""
    return sum([len(part.text) for message in messages for part in message.content if isinstance(part, Text)])

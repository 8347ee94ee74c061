"""One episode's `Session`: joins its environment and its policy, and keeps what happened between them."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

from relax_sdk.env import Env
from relax_sdk.errors import EnvError, EpisodeError, EpisodeOver, RelaxError
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.session import StepOutcome
from relax_sdk.trajectory import Turn
from relax_server.rollout.calls import Answer, CallOptions
from relax_server.rollout.context import RolloutContext
from relax_server.rollout.environment import EnvRunner, named_error
from relax_server.rollout.policy.base import Policy
from relax_server.rollout.task import EpisodeTask

MOST_IDS = 1 << 24
"""Token ids that the turns of one episode may hold together: each keeps its whole prompt, so they grow with the square of the
number of turns."""


class State(StrEnum):
    """The state of an episode that has not ended; it ends in one of `relax_sdk.trajectory.Status`."""

    QUEUED = "queued"
    RESETTING = "resetting"
    RUNNING = "running"
    SCORING = "scoring"


class EpisodeSession:
    """The `relax_sdk.session.Session` of one episode.

    Args:
        context: shared by all episodes.
        task: what to play.
        enter: told of every new state.
    """

    def __init__(self, context: RolloutContext, task: EpisodeTask, enter: Callable[[State], None]) -> None:
        self.context = context
        self.task = task
        self.trace = context.traces.episode(context.run, context.spec, task)
        self.runner = EnvRunner(context, task, self.trace)
        self.policy: Policy | None = None
        """Made when the environment was reset."""
        self.messages: list[Message] = []
        """The conversation as the policy saw it last, its answer and the observation after it included."""
        self.first: Sequence[Message] | None = None
        """What the policy is shown first, system prompt included."""
        self.outcome: StepOutcome | None = None
        """The last one."""
        self.failure: RelaxError | None = None
        """The error that ended the episode; it counts even if the agent swallows it."""
        self.limit_reached: EpisodeOver | None = None
        self.extra_rewards: dict[str, float] = {}
        """Components that came from outside; they count with weight 1."""
        self.extra_info: dict[str, Any] = {}
        """Facts that are kept with the trajectory's `info`."""
        self.timings: defaultdict[str, float] = defaultdict(float)
        self._held = 0
        """Token ids of all turns."""
        self._enter = enter

    # ----------------------------------------------------------------------------------------------------- protocol

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """OpenAI schemas of the environment's tools."""
        if self.env is None:
            raise EpisodeError(f"{self.where('session')}: call reset first")
        return self.runner.tools[0]

    @property
    def done(self) -> bool:
        """Whether the environment has ended the episode."""
        return self.outcome is not None and self.outcome.done

    async def reset(self) -> list[Message]:
        """See `Session.reset`."""
        if self.env is not None:
            raise self._fail("reset", EpisodeError("an episode is reset once"))
        self._enter(State.RESETTING)
        started = time.monotonic()
        try:
            with self.trace.stage("reset"):
                messages, info = await self.runner.reset()
                self.outcome = StepOutcome(info=info)
                self.policy = self.context.policies.of(self.runner)
                self.extra_info |= self.policy.info
                messages = await self.policy.keep(messages)
        except BaseException as error:
            raise self._fail("reset", error) from error
        finally:
            self.timings["reset"] += time.monotonic() - started
        self.first, self.messages = tuple(messages), list(messages)
        self._enter(State.RUNNING)
        self._enter = _told  # a reference back to the episode would leave both to the garbage collector
        return messages

    async def generate(self, messages: Sequence[Message]) -> AssistantMessage:
        """See `Session.generate`."""
        try:
            return (await self.call(messages)).message
        except EpisodeOver:
            raise
        except BaseException as error:
            if error is self.failure:
                raise
            raise self._fail("generate", error, EpisodeError) from error

    async def call(self, messages: Sequence[Message], options: CallOptions | None = None) -> Answer:
        """Ask the policy, with all that an agent may ask for; several calls may be under way at once.

        An error here is not the episode's: the agent may mend its request, or call again.

        Raises:
            EpisodeOver: the episode's limit on turns or tokens is reached.
            EpisodeError: the episode is over, or there is nothing to answer.
            TokenError, MediaError: the messages do not fit the model.
            EngineError, EpisodeTimeout: no answer could be had.
        """
        policy, limit = await self._require_open(), self.context.config.max_turns
        started = time.monotonic()
        try:
            if len(policy.turns) >= limit:
                raise EpisodeOver(f"the episode has reached max_turns = {limit}")
            if self._held >= MOST_IDS:
                raise EpisodeOver(f"the episode's prompts and answers hold {self._held} tokens; allowed: {MOST_IDS}")
            with self.trace.stage("generate") as span:
                answer = await policy.ask(messages, options or CallOptions())
                span.answered(answer.turn)
            self._held += len(answer.turn.prompt_ids) + len(answer.turn.response_ids)
        except EpisodeOver as over:
            self.limit_reached = over
            raise
        finally:
            self.timings["generate"] += time.monotonic() - started
        self.messages = [*answer.asked, answer.message]
        return answer

    async def step(self, action: AssistantMessage) -> StepOutcome:
        """See `Session.step`."""
        return await self._act("step", lambda: self.runner.step(action))

    async def call_tools(self, action: AssistantMessage) -> StepOutcome:
        """See `Session.call_tools`."""
        return await self._act("call_tools", lambda: self.runner.call_tools(action))

    # ------------------------------------------------------------------------------------------------- what there is

    @property
    def env(self) -> Env | None:
        """The environment, from its reset until it is closed."""
        return self.runner.env

    @property
    def turns(self) -> list[Turn]:
        """Answers of the policy so far."""
        return self.policy.turns if self.policy is not None else []

    @property
    def excluded(self) -> float:
        """Seconds spent so far waiting for a thread or behind a pause; they count against no limit."""
        return self.runner.clock.excluded

    def where(self, stage: str) -> str:
        """Environment, task, sample, turn and stage, to begin an error with."""
        task = self.task
        place = f"{task.split} task {task.task_index}, sample {task.group_index}, turn {len(self.turns)}"
        return f"{self.context.spec.id}, {place}, {stage}"

    async def close(self) -> None:
        """Close the environment; a failure is counted, as the episode is over."""
        try:
            await self.runner.close()
        except Exception as error:
            self.context.tally.closing += 1
            self.context.tally.errors.append(f"{self.where('close')}: {error}")

    # ---------------------------------------------------------------------------------------------------------- parts

    async def _act(self, stage: str, act: Callable[[], Awaitable[StepOutcome]]) -> StepOutcome:
        policy = await self._require_open()
        if not policy.turns:
            raise self._fail(stage, EpisodeError("there is no action of the policy yet; call generate first"))
        started = time.monotonic()
        try:
            with self.trace.stage(stage):
                outcome = await act()
                outcome = replace(outcome, observation=await policy.keep(outcome.observation))
        except BaseException as error:
            raise self._fail(stage, error) from error
        finally:
            self.timings["step"] += time.monotonic() - started
        policy.turns[-1].reward += outcome.reward
        self.outcome = outcome
        self.messages = [*self.messages, *outcome.observation]
        return outcome

    async def _require_open(self) -> Policy:
        """The policy; raises if the episode has ended, and yields first, so that an agent that swallows this cannot stop the
        loop."""
        over = self.failure or self.limit_reached
        if over is not None:
            await asyncio.sleep(0)
            raise over
        if self.done:
            await asyncio.sleep(0)
            raise self._fail("session", EpisodeError("the agent acts though the episode is over"))
        if self.outcome is None or self.policy is None:
            raise self._fail("session", EpisodeError("call reset first"))
        return self.policy

    def _fail(self, stage: str, error: BaseException, kind: type[EpisodeError] = EnvError) -> BaseException:
        """What to raise for an error: itself if it was a cancellation, else one that says where it happened."""
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                return error
        if isinstance(error, (KeyboardInterrupt, GeneratorExit)):
            return error
        self.failure = named_error(self.where(stage), error, kind)
        return self.failure


def _told(state: State) -> None:
    """Tell nobody: the session enters no state after `running` by itself."""

"""One episode's `Session`: the environment and the policy, with time limits, checks and records around every call."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

from relax_sdk import errors
from relax_sdk.env import Env
from relax_sdk.errors import EngineAborted, EnvError, EpisodeError, EpisodeTimeout, RelaxError, TokenError
from relax_sdk.media import Media
from relax_sdk.messages import AssistantMessage, Message, Text
from relax_sdk.session import EpisodeOver, StepOutcome
from relax_sdk.tools import call_tools
from relax_sdk.trajectory import Turn
from relax_sdk.validation import check_flag, check_reset, check_reward, check_step
from relax_server.engines.base import GenerateRequest
from relax_server.rollout.calls import Answer, CallOptions
from relax_server.rollout.context import EpisodeTask, RolloutContext
from relax_server.rollout.media import PreparedMedia
from relax_server.rollout.pool import Listener
from relax_server.rollout.recorder import Prompt, TokenRecorder

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds before a turn that was aborted from outside is sent again; doubled each time."""


class State(StrEnum):
    """Where an episode is; it ends in one of `relax_sdk.trajectory.Status`."""

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
        self.env: Env | None = None
        self.lost = False
        """A thread is stuck inside the environment, which must not be touched any more."""
        self.recorder: TokenRecorder | None = None
        self.messages: list[Message] = []
        """The conversation as the policy saw it last, its answer and the observation after it included."""
        self.first: Sequence[Message] | None = None
        """What the policy is shown first, system prompt included."""
        self.outcome: StepOutcome | None = None
        """The last one."""
        self.failure: RelaxError | None = None
        """Kept even if the agent swallows it."""
        self.limit_reached: EpisodeOver | None = None
        self.extra_rewards: dict[str, float] = {}
        """Components that came from outside; they count with weight 1."""
        self.extra_info: dict[str, Any] = {}
        """Kept with the trajectory's `info`."""
        self.timings: defaultdict[str, float] = defaultdict(float)
        self._excluded = 0.0
        self._waiting: dict[object, Callable[[], float]] = {}
        self._enter = enter
        self._media: dict[str, PreparedMedia] = {}
        self._calls = itertools.count()

    # ----------------------------------------------------------------------------------------------------- protocol

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """OpenAI schemas of the environment's tools."""
        return self.context.tools(self._environment)[0]

    @property
    def done(self) -> bool:
        """Whether the environment has ended the episode."""
        return self.outcome is not None and self.outcome.done

    @property
    def turns(self) -> list[Turn]:
        """Recorded so far."""
        return self.recorder.turns if self.recorder is not None else []

    async def reset(self) -> list[Message]:
        """See `Session.reset`."""
        if self.env is not None:
            raise self._fail("reset", EpisodeError("an episode is reset once"))
        self._enter(State.RESETTING)
        started = time.monotonic()
        try:
            result = await self._begin()
            messages, info = check_reset(result, self.context.observes)
            self.outcome = StepOutcome(info=info)
            messages = await self._stored(messages)
            prompt = self._environment.system_prompt
            if prompt is not None:
                messages.insert(0, Message("system", (Text(prompt),)))
            self.recorder = self._make_recorder()
        except BaseException as error:
            raise self._fail("reset", error) from error
        finally:
            self.timings["reset"] += time.monotonic() - started
        self.first, self.messages = tuple(messages), list(messages)
        self._enter(State.RUNNING)
        self._enter = _told  # a reference back to the episode would leave both to the garbage collector
        return messages

    def _make_recorder(self) -> TokenRecorder | None:
        return TokenRecorder(self.context.renderer, *self.context.tools(self._environment))

    async def generate(self, messages: Sequence[Message]) -> AssistantMessage:
        """See `Session.generate`."""
        try:
            return await self._ask(messages)
        except EpisodeOver:
            raise
        except BaseException as error:
            if error is self.failure:
                raise
            raise self._fail("generate", error, EpisodeError) from error

    async def _ask(self, messages: Sequence[Message]) -> AssistantMessage:
        return (await self.call(messages)).message

    async def call(self, messages: Sequence[Message], options: CallOptions | None = None) -> Answer:
        """Ask the policy, with all that an agent may ask for; several calls may be under way at once.

        An error here is not the episode's: the agent may mend its request, or call again.

        Raises:
            EpisodeOver: the episode's limit on turns or tokens is reached.
            EpisodeError: the episode is over, or there is nothing to answer.
            TokenError, MediaError: the messages do not fit the model.
            EngineError, EpisodeTimeout: no answer could be had.
        """
        await self._require_open()
        options = options or CallOptions()
        recorder, config = self._recorder, self.context.config
        if len(recorder.turns) >= config.max_turns:
            raise self._end(f"the episode has reached max_turns = {config.max_turns}")
        started = time.monotonic()
        try:
            plan = recorder.plan(await self._stored(messages), options.tools, options.tools_key)
            prepared = await self._take(plan.new_media)
            prompt = recorder.prompt(plan, [item.features for item in prepared if item.features is not None])
            room = config.max_tokens - len(prompt.expanded)
            if room < 1 and not recorder.turns:
                raise TokenError(f"the first prompt has {len(prompt.expanded)} tokens; max_tokens is {config.max_tokens}")
            if room < 1:
                raise self._end(f"the episode has reached max_tokens = {config.max_tokens}")
            turn = await self._sample(prompt, room, options)
            message = recorder.answer(plan, prompt, turn, options.shown)
        finally:
            self.timings["generate"] += time.monotonic() - started
        self.messages = [*prompt.messages, message]
        return Answer(message, turn, prompt)

    async def step(self, action: AssistantMessage) -> StepOutcome:
        """See `Session.step`."""
        return await self._act("step", lambda: self._step(action))

    async def call_tools(self, action: AssistantMessage) -> StepOutcome:
        """See `Session.call_tools`."""
        return await self._act("call_tools", lambda: self._call_tools(action))

    # ------------------------------------------------------------------------------------------------- environment

    async def invoke(self, function: Callable[..., Any], *arguments: Any, limit: float) -> Any:
        """Call a plain or async function of the environment where it may block, and return its value.

        Raises:
            EpisodeTimeout: it took longer than `limit` seconds.
        """
        if self.context.env_class.blocking and not inspect.iscoroutinefunction(function):
            value = await self._in_thread(function, *arguments, limit=limit)
        else:
            value = function(*arguments)
        if not inspect.isawaitable(value):
            return value
        clock = asyncio.timeout(limit)
        try:
            async with clock:
                value = await value
        except TimeoutError:
            if not clock.expired():
                raise
        if clock.expired():
            raise EpisodeTimeout(f"took longer than {limit:g} s")
        return value

    async def close(self) -> None:
        """Close the environment; a failure is counted, as the episode is over."""
        env, self.env = self.env, None
        if env is None or self.lost or not self.context.needs_close:
            return
        try:
            await self.invoke(env.close, limit=self.context.config.step_timeout)
        except Exception as error:
            self.context.tally.closing += 1
            self.context.tally.errors.append(f"{self.where('close')}: {error}")

    def where(self, stage: str) -> str:
        """Environment, task, sample, turn and stage, to begin an error with."""
        task = self.task
        place = f"{task.split} task {task.task_index}, sample {task.group_index}, turn {len(self.turns)}"
        return f"{self.context.spec.id}, {place}, {stage}"

    @property
    def excluded(self) -> float:
        """Seconds spent so far waiting for a thread or behind a pause; they count against no limit."""
        return self._excluded + sum(waited() for waited in self._waiting.values())

    @contextlib.contextmanager
    def _waits(self, waited: Callable[[], float]) -> Iterator[None]:
        """A wait that counts against no limit; `waited` tells its seconds so far."""
        token = object()
        self._waiting[token] = waited
        try:
            yield
        finally:
            del self._waiting[token]
            self._excluded += waited()

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any, limit: float) -> Any:
        threads = self.context.threads
        job = threads.submit(function, *arguments, limit=limit, orphaned=self._orphaned)
        try:
            with self._waits(lambda: job.queued):
                return await job.future
        except asyncio.CancelledError:
            threads.give_up(job)
            raise
        finally:
            self.lost = self.lost or job.given_up

    def _orphaned(self) -> None:
        """Close the environment in the thread that has at last come back from it."""
        if self.env is not None and self.context.needs_close and not inspect.iscoroutinefunction(self.env.close):
            self.env.close()

    @property
    def _environment(self) -> Env:
        if self.env is None:
            raise EpisodeError(f"{self.where('session')}: call reset first")
        return self.env

    @property
    def _recorder(self) -> TokenRecorder:
        if self.recorder is None:
            raise EpisodeError(f"{self.where('session')}: call reset first")
        return self.recorder

    async def _begin(self) -> Any:
        """Make the environment and reset it, in one visit to a thread where both are plain functions."""
        spec, limit = self.context.spec, self.context.config.reset_timeout
        options = {"task": dict(self.task.row)}

        def make() -> Any:
            self.env = self.context.env_class(**spec.kwargs)
            if inspect.iscoroutinefunction(self.env.reset):
                return None
            return self.env.reset(seed=self.task.seed, options=options)

        result = await self.invoke(make, limit=limit)
        if inspect.iscoroutinefunction(self._environment.reset):
            reset = functools.partial(self._environment.reset, seed=self.task.seed, options=options)
            result = await self.invoke(reset, limit=limit)
        return result

    async def _step(self, action: AssistantMessage) -> StepOutcome:
        return check_step(await self.invoke(self._environment.step, action, limit=self.context.config.step_timeout))

    async def _call_tools(self, action: AssistantMessage) -> StepOutcome:
        limit = self.context.config.step_timeout
        invoke = functools.partial(self.invoke, limit=limit)
        messages, reward, terminated, truncated = await call_tools(self._environment, action, invoke)
        return StepOutcome(
            messages,
            check_reward("the tools", reward),
            check_flag("terminated", terminated),
            check_flag("truncated", truncated),
            self.outcome.info if self.outcome is not None else {},
        )

    async def _act(self, stage: str, act: Callable[[], Awaitable[StepOutcome]]) -> StepOutcome:
        await self._require_open()
        if not self.turns:
            raise self._fail(stage, EpisodeError("there is no action of the policy yet; call generate first"))
        started = time.monotonic()
        try:
            outcome = await act()
            outcome = replace(outcome, observation=await self._stored(outcome.observation))
        except BaseException as error:
            raise self._fail(stage, error) from error
        finally:
            self.timings["step"] += time.monotonic() - started
        self.turns[-1].reward += outcome.reward
        self.outcome = outcome
        self.messages = [*self.messages, *outcome.observation]
        return outcome

    # -------------------------------------------------------------------------------------------------------- media

    async def _take(self, media: Sequence[Media]) -> list[PreparedMedia]:
        if not media:
            return []
        prepared = await self.context.intake.take(media)
        self._media.update((item.ref.sha256, item) for item in prepared)
        return prepared

    async def _stored(self, messages: Sequence[Message]) -> list[Message]:
        """The same messages once their media are in the store, from where their bytes are read when they are wanted: a history
        that is kept, and sent again with every call, holds none."""
        await self._take([item for message in messages for item in message.media])
        return [message.map_media(lambda item: self.context.intake.store.load(item.ref)) for message in messages]

    # ------------------------------------------------------------------------------------------------------- policy

    async def _sample(self, prompt: Prompt, room: int, options: CallOptions) -> Turn:
        """One answer; an answer that was aborted from outside is asked for again, unless part of it was told already."""
        media = [self._media[item.ref.sha256] for item in prompt.media]
        number, limit = next(self._calls), self.context.config.turn_timeout
        listener = Listener(options.on_partial) if options.on_partial is not None else None
        request = GenerateRequest(
            prompt.ids,
            self.task.sampling_at(len(self.turns), room, options.sampling),
            tuple(item.item for item in media),
            return_routed_experts=self.context.routed_experts,
            alone=self.task.group_size == 1,
        )
        pause, aborts, left = FIRST_PAUSE, 0, limit
        while True:
            await self._pass_gate()
            started = time.monotonic()
            rid = f"{self.task.id}/{number}/{self.task.attempt}.{aborts}"
            try:
                generation, engine = await self.context.pool.generate(
                    replace(request, rid=rid), left, self.task.group_id, listener
                )
            except EngineAborted:
                generation, engine = None, ""
            seconds = time.monotonic() - started
            if generation is not None and generation.finish_reason != "abort":
                refs = [item.ref for item in media]
                return self._recorder.record(prompt, generation, refs, engine, seconds)
            aborts += 1
            left -= seconds + pause
            if left <= 0 or (listener is not None and listener.heard):
                raise EngineAborted(f"the turn was aborted {aborts} times from outside within {limit:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _pass_gate(self) -> None:
        gate = self.context.gate
        if gate.is_set():
            return
        started = time.monotonic()
        with self._waits(lambda: time.monotonic() - started):
            await gate.wait()

    # -------------------------------------------------------------------------------------------------------- ends

    async def _require_open(self) -> None:
        """Raise if the episode has ended; it yields first, so that an agent that swallows this cannot stop the loop."""
        over = self.failure or self.limit_reached
        if over is not None:
            await asyncio.sleep(0)
            raise over
        if self.done:
            await asyncio.sleep(0)
            raise self._fail("session", EpisodeError("the agent acts though the episode is over"))
        if self.outcome is None:
            raise self._fail("session", EpisodeError("call reset first"))

    def _end(self, reason: str) -> EpisodeOver:
        self.limit_reached = EpisodeOver(reason)
        return self.limit_reached

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
    """Nobody is told of a state after `running` by the session."""


def named_error(where: str, error: BaseException, kind: type[EpisodeError] = EnvError) -> RelaxError:
    """`error` with the place in front; an error that is not ours becomes one of `kind`, with the line that raised it."""
    found = type(error)
    if getattr(errors, found.__name__, None) is found and issubclass(found, RelaxError):
        return found(f"{where}: {error}")
    return kind(f"{where}: {errors.raised(error)}")

"""`EnvRunner`: one episode's environment, with checks, threads and time limits around every call of its code."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from relax_sdk import errors
from relax_sdk.config import RolloutConfig
from relax_sdk.env import Env
from relax_sdk.errors import EnvError, EpisodeError, EpisodeTimeout, RelaxError
from relax_sdk.messages import AssistantMessage, Message, Text
from relax_sdk.registry import EnvSpec
from relax_sdk.session import StepOutcome
from relax_sdk.tools import call_tools, tool_schemas
from relax_sdk.validation import check_flag, check_reset, check_reward, check_step
from relax_server.rollout.clock import EpisodeClock
from relax_server.rollout.task import EpisodeTask
from relax_server.rollout.threads import CallThreads
from relax_server.rollout.traces import EpisodeTrace

OURS = ("relax_sdk", "relax_server")
"""Packages whose errors are told as they are."""


@dataclass(kw_only=True)
class EnvContext:
    """What all episodes share on the side of the environment."""

    spec: EnvSpec
    env_class: type[Env]
    config: RolloutConfig
    threads: CallThreads
    """Plain functions of environments that may block are called here."""
    observes: bool = True
    """Whether an episode must begin with an observation; not so where the agent has a world of its own."""

    @functools.cached_property
    def needs_close(self) -> bool:
        """Whether environments define `close`."""
        return self.env_class.close is not Env.close

    def tools(self, env: Env) -> tuple[Sequence[dict[str, Any]], str]:
        """Schemas of the environment's tools, and a name for them; made once, as they belong to the class."""
        if self._tools is None:
            schemas = tool_schemas(env)
            self._tools = schemas, json.dumps(schemas, sort_keys=True)
        return self._tools

    _tools: tuple[Sequence[dict[str, Any]], str] | None = field(default=None, init=False)


class EnvRunner:
    """Runs one episode's environment. Errors of its code are raised as they are; the session says where they happened.

    Args:
        context: shared by all episodes.
        task: what to play.
        trace: gets a span for each call of a tool.
    """

    def __init__(self, context: EnvContext, task: EpisodeTask, trace: EpisodeTrace) -> None:
        self.context = context
        self.task = task
        self._trace = trace
        self.clock = EpisodeClock()
        self.env: Env | None = None
        self.lost = False
        """A thread is stuck inside the environment, which must not be touched any more."""
        self._info: dict[str, Any] = {}
        """The last one."""
        self._show = None if task.lens is None else task.lens(task.task_index)

    @property
    def tools(self) -> tuple[Sequence[dict[str, Any]], str]:
        """OpenAI schemas of the environment's tools, and a name for them.

        Raises:
            EpisodeError: it was not reset yet.
        """
        return self.context.tools(self._environment)

    async def reset(self) -> tuple[list[Message], dict[str, Any]]:
        """Make the environment and reset it.

        Returns:
            The first observation with the environment's system prompt in front of it, and `info`.

        Raises:
            EnvError: it does not give `(observation, info)`.
            EpisodeTimeout: it took longer than `reset_timeout`.
        """
        messages, self._info = check_reset(await self._begin(), self.context.observes)
        messages = await self._seen(messages)
        prompt = self._environment.system_prompt
        if prompt is not None:
            messages.insert(0, Message("system", (Text(prompt),)))
        return messages, self._info

    async def step(self, action: AssistantMessage) -> StepOutcome:
        """Act in the environment.

        Raises:
            EnvError: it does not give what gymnasium's `step` gives.
            EpisodeTimeout: it took longer than `step_timeout`.
        """
        outcome = check_step(await self.invoke(self._environment.step, action, limit=self.context.config.step_timeout))
        self._info = outcome.info
        return replace(outcome, observation=await self._seen(outcome.observation)) if self._show is not None else outcome

    async def call_tools(self, action: AssistantMessage) -> StepOutcome:
        """Carry out the tool calls of an action, each within `step_timeout`; `info` is that of the last `step` or `reset`.

        Raises:
            EnvError: what the tools give as reward and ends has the wrong type.
            EpisodeTimeout: one of them took too long.
        """
        limit, tools = self.context.config.step_timeout, {call.name for call in action.tool_calls}

        async def invoke(function: Callable[..., Any], *arguments: Any) -> Any:
            name = getattr(getattr(function, "func", None), "__name__", "")
            with self._trace.stage("tool", name) if name in tools else nullcontext():
                return await self.invoke(function, *arguments, limit=limit)

        messages, reward, terminated, truncated = await call_tools(self._environment, action, invoke)
        return StepOutcome(
            await self._seen(messages),
            check_reward("the tools", reward),
            check_flag("terminated", terminated),
            check_flag("truncated", truncated),
            self._info,
        )

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
        """Close the environment, unless it was closed or a thread is stuck in it; what its `close` raises is raised."""
        env, self.env = self.env, None
        if env is None or self.lost or not self.context.needs_close:
            return
        await self.invoke(env.close, limit=self.context.config.step_timeout)

    async def _seen(self, messages: list[Message]) -> list[Message]:
        """What the policy is shown of an observation."""
        if self._show is None or not messages:
            return messages
        return await self.context.threads.call(self._show, messages, limit=self.context.config.step_timeout)

    @property
    def _environment(self) -> Env:
        if self.env is None:
            raise EpisodeError("call reset first")
        return self.env

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

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any, limit: float) -> Any:
        threads = self.context.threads
        job = threads.submit(function, *arguments, limit=limit, orphaned=self._orphaned)
        try:
            with self.clock.waits(lambda: job.queued):
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


def named_error(where: str, error: BaseException, kind: type[EpisodeError] = EnvError) -> RelaxError:
    """`error` with the place in front; an error that is not ours becomes one of `kind`, with the line that raised it."""
    if isinstance(error, RelaxError) and type(error).__module__.partition(".")[0] in OURS:
        own: type[RelaxError] = type(error)
        named = own.__new__(own)
        named.__dict__.update(error.__dict__)  # such as the status of a refusal
        named.args = (f"{where}: {error}",)
        return named
    return kind(f"{where}: {errors.raised(error)}")

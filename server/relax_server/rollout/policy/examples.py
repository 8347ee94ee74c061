"""Policies of the format warm-up: the environment's `format_example` answers in place of a model."""

from __future__ import annotations

import functools
import time

import numpy as np

from relax_sdk.env import Env
from relax_sdk.examples import ask_example
from relax_sdk.messages import AssistantMessage
from relax_sdk.trajectory import VersionSpan, derive_seed
from relax_server.engines.base import Generation, MediaItem
from relax_server.rollout.calls import CallOptions
from relax_server.rollout.environment import EnvRunner
from relax_server.rollout.policy.base import Policy
from relax_server.rollout.policy.tokens import Sampled, TokenPolicies, TokenPolicy
from relax_server.rollout.recorder import RecordedPrompt

URL = "format-examples"
"""Stands where turns name their engine."""


class ExamplePolicy(TokenPolicy):
    """Answers with random well-formed actions of one episode's environment.

    Args:
        shared: with the other episodes.
        runner: of the episode's environment.
    """

    def __init__(self, shared: TokenPolicies, runner: EnvRunner) -> None:
        super().__init__(shared.renderer, shared.intake, *runner.tools, runner.context.config.max_tokens)
        self._runner = runner
        self._rng = np.random.default_rng(derive_seed(runner.task.seed, "format_example"))

    async def sample(self, prompt: RecordedPrompt, media: tuple[MediaItem, ...], room: int, options: CallOptions) -> Sampled:
        started = time.monotonic()
        ids = self.recorder.processor.encode_action(await self._example())
        generation = Generation(prompt.expanded, ids, [0.0] * len(ids), [VersionSpan(0, 0, len(ids))], "stop")
        return Sampled(generation, URL, time.monotonic() - started)

    async def _example(self) -> AssistantMessage:
        runner = self._runner
        assert isinstance(runner.env, Env)
        invoke = functools.partial(runner.invoke, limit=runner.context.config.step_timeout)
        return await ask_example(runner.env, self._rng, invoke)


class ExamplePolicies(TokenPolicies):
    """Policies that give examples of an action's form."""

    def of(self, runner: EnvRunner) -> Policy:
        return ExamplePolicy(self, runner)

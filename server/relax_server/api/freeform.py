"""Episodes without an environment: the agent has a world of its own, and its reward comes from outside."""

from __future__ import annotations

from typing import Any, ClassVar

from relax_sdk.env import Env, ResetResult, StepResult
from relax_sdk.messages import AssistantMessage
from relax_sdk.registry import EnvSpec


class FreeEnv(Env):
    """Shows nothing and cannot be acted in."""

    modalities: ClassVar[set[str]] = set()
    blocking: ClassVar[bool] = False
    version = "1"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        return None, {}

    def step(self, action: AssistantMessage) -> StepResult:
        raise NotImplementedError("this session has no environment to act in; post its reward and finish it")


FREE = EnvSpec("none", FreeEnv, tasks={"train": [{}], "eval": [{}]})
"""The environment of sessions that name none."""

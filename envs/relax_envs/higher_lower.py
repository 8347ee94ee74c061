"""`higher-lower-v0`: find a hidden number with a tool that says higher or lower."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from relax_envs.choice import task_row
from relax_envs.rows import GeneratedRows, splits
from relax_sdk.env import Env, ResetResult, StepResult
from relax_sdk.messages import AssistantMessage, ToolCall
from relax_sdk.tools import ToolResult, tool

NUMBERS, GUESSES = 8, 3


def make_row(label: int, rng: np.random.Generator) -> dict[str, Any]:
    """`{"number": 1 … 8}`."""
    return {"number": label + 1}


def tasks() -> dict[str, GeneratedRows]:
    """Rows by split; see `make_row`. There are only eight different ones: what is learnt is the search, not the rows."""
    return splits(make_row, NUMBERS, "higher-lower")


class HigherLowerEnv(Env):
    """A number from 1 to 8 is hidden; three guesses, each a tool call; the reward is 1.0 when it is found, else 0.0.

    Three uniformly random guesses find it with probability 1 - (7/8)^3 ≈ 0.330. Three guesses that heed the answers
    (4, then 2 or 6, then the odd number between) find seven of the eight: 7/8 is the best possible.
    An action without a tool call ends the episode. A call that cannot be read is told so and costs no guess, but a turn.
    """

    blocking: ClassVar[bool] = False
    version = "1"
    tasks = staticmethod(tasks)

    def __init__(self) -> None:
        self._number = 0
        self._left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        self._number, self._left = int(task_row(self, options)["number"]), GUESSES
        return f"1-{NUMBERS}?", {}

    @tool
    def guess(self, number: int) -> ToolResult:
        """Guess the number."""
        if number == self._number:
            return ToolResult("correct", reward=1.0, terminated=True)
        self._left -= 1
        return ToolResult("higher" if self._number > number else "lower", terminated=self._left == 0)

    def step(self, action: AssistantMessage) -> StepResult:
        return None, 0.0, True, False, {}

    def format_example(self, rng: np.random.Generator) -> AssistantMessage:
        number = int(rng.integers(NUMBERS)) + 1
        return AssistantMessage(tool_calls=(ToolCall("call_0", "guess", {"number": number}),))

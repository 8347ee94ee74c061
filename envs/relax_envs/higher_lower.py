"""`higher-lower-v0` and `higher-lower-8-v0`: find a hidden number with a tool that says higher or lower."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from relax_envs.rows import GeneratedRows, splits
from relax_sdk.env import Env, ResetResult, StepResult
from relax_sdk.messages import AssistantMessage, ToolCall
from relax_sdk.tools import ToolResult, tool

NUMBERS, GUESSES = 8, 3
SMALL_NUMBERS, SMALL_GUESSES = 3, 2
"""Small enough for a model that starts from random weights."""


def make_row(label: int, rng: np.random.Generator) -> dict[str, Any]:
    """`{"number": 1 … 8}`."""
    return {"number": label + 1}


def tasks() -> dict[str, GeneratedRows]:
    """Rows by split; see `make_row`. There are only eight different ones: what is learnt is the search, not the rows."""
    return splits(make_row, NUMBERS, "higher-lower")


def small_tasks() -> dict[str, GeneratedRows]:
    """Rows with the numbers 1 to 3."""
    return splits(make_row, SMALL_NUMBERS, "higher-lower-small")


class HigherLowerEnv(Env):
    """A number from 1 to n is hidden; a few guesses, each a tool call; the reward is 1.0 when it is found, else 0.0.

    With n = 8 and three guesses, uniformly random ones find it with probability 1 - (7/8)^3 ≈ 0.330. Guesses that heed the
    answers (4, then 2 or 6, then the odd number between) find seven of the eight: 7/8 is the best possible.
    With n = 3 and two guesses it is 1 - (2/3)^2 ≈ 0.556 at random, and 1 by guessing 2 first.
    An action without a tool call ends the episode. A call that cannot be read is told so and costs no guess, but a turn.
    """

    blocking: ClassVar[bool] = False
    version = "1"
    tasks = staticmethod(tasks)

    def __init__(self, numbers: int = NUMBERS, guesses: int = GUESSES) -> None:
        self.numbers, self.guesses = numbers, guesses
        self._number = 0
        self._left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(self.numbers)) + 1
        self._number = int(options["task"]["number"]) if options and "task" in options else drawn
        self._left = self.guesses
        return f"1-{self.numbers}?", {}

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
        number = int(rng.integers(self.numbers)) + 1
        return AssistantMessage(tool_calls=(ToolCall("call_0", "guess", {"number": number}),))

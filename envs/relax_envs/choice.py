"""`ChoiceEnv`: one look at something, one letter as the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from relax_sdk.env import Env, ResetResult, StepResult
from relax_sdk.messages import AssistantMessage, Text

LETTERS = "ABCD"


def letter(rng: np.random.Generator, choices: int) -> AssistantMessage:
    """One of the first `choices` letters, drawn at random."""
    return AssistantMessage(content=(Text(LETTERS[int(rng.integers(choices))]),))


class ChoiceEnv(Env):
    """Shows `task[<modality>]` with a question; the reward is 1.0 for exactly the letter `task["answer"]`, else 0.0.

    The right letter is in the `info` of `step`, for those who look at episodes.

    Subclasses set `modality`, `question`, `choices` and `tasks`. A reset without a task plays a random training row.
    """

    modality: ClassVar[str]
    """The row's column to show: `audio`, `image` or `video`."""
    question: ClassVar[str]
    choices: ClassVar[int]
    """Number of letters that may be the answer, from A."""
    tasks: ClassVar[Callable[[], Mapping[str, Sequence[dict[str, Any]]]]]
    blocking: ClassVar[bool] = False
    version = "1"

    def __init__(self) -> None:
        self._answer = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        task = task_row(self, options)
        self._answer = task["answer"]
        return [task[self.modality], self.question], {}

    def step(self, action: AssistantMessage) -> StepResult:
        right = action.text.strip() == self._answer and not action.control_tokens
        return None, float(right), True, False, {"answer": self._answer}

    def format_example(self, rng: np.random.Generator) -> AssistantMessage:
        return letter(rng, self.choices)


def task_row(env: Any, options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """`options["task"]`, or a random training row of `env` where an environment is reset without one."""
    if options and "task" in options:
        return options["task"]
    rows = env.tasks()["train"]
    return rows[int(env.np_random.integers(len(rows)))]

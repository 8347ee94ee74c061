"""`omni-quiz-v0`: one episode of three turns, which are to hear, to see and to watch."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from relax_envs.choice import LETTERS, letter, task_row
from relax_envs.colour import COLOURS, ColourEnv, make_picture
from relax_envs.motion import DIRECTIONS, MotionEnv, make_clip
from relax_envs.rows import GeneratedRows, splits
from relax_envs.tone import TONES, ToneEnv, make_tone
from relax_sdk.env import Env, ResetResult, StepResult
from relax_sdk.messages import AssistantMessage

TURNS = (ToneEnv, ColourEnv, MotionEnv)


def make_row(label: int, rng: np.random.Generator) -> dict[str, Any]:
    """`{"audio", "image", "video", "answer"}`; the answer is three letters, one a turn; all 32 are equally frequent."""
    label, tone = divmod(label, len(TONES))
    motion, colour = divmod(label, len(COLOURS))
    return {
        "audio": make_tone(tone, rng),
        "image": make_picture(colour, rng),
        "video": make_clip(motion, rng),
        "answer": LETTERS[tone] + LETTERS[colour] + LETTERS[motion],
    }


def tasks() -> dict[str, GeneratedRows]:
    """Rows by split; see `make_row`."""
    return splits(make_row, len(TONES) * len(COLOURS) * len(DIRECTIONS), "omni-quiz")


class OmniQuizEnv(Env):
    """The questions of `tone-v0`, `colour-v0` and `motion-v0`, one after the other, each worth 1/3.

    The next question comes whatever the answer was, and nothing says whether it was right.
    Chance is (1/4 + 1/4 + 1/2) / 3 = 1/3.
    """

    modalities: ClassVar[set[str]] = {"audio", "image", "video"}
    blocking: ClassVar[bool] = False
    version = "1"
    tasks = staticmethod(tasks)

    def __init__(self) -> None:
        self._turn = 0
        self._task: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        self._turn, self._task = 0, task_row(self, options)
        return self._question(), {}

    def step(self, action: AssistantMessage) -> StepResult:
        right = action.text.strip() == self._task["answer"][self._turn] and not action.control_tokens
        reward = right / len(TURNS)
        self._turn += 1
        over = self._turn == len(TURNS)
        info = {"answer": self._task["answer"]} if over else {}
        return (None if over else self._question()), reward, over, False, info

    def format_example(self, rng: np.random.Generator) -> AssistantMessage:
        return letter(rng, TURNS[self._turn].choices)

    def _question(self) -> list[Any]:
        turn = TURNS[self._turn]
        return [self._task[turn.modality], turn.question]

"""Small environments of which each, but the first, has a mistake that beginners make."""

from __future__ import annotations

import random
import time
from typing import Any, ClassVar

import numpy as np

import relax_sdk as relax

LETTERS = "ABCD"
ROWS = 64


def letters(n: int = ROWS) -> list[dict[str, Any]]:
    """Rows with an answer each; neighbours differ."""
    return [{"index": i, "answer": LETTERS[i % len(LETTERS)]} for i in range(n)]


class Copy(relax.Env):
    """Say the letter that is shown. Nothing is wrong here."""

    tasks = staticmethod(letters)
    answer = ""

    def reset(self, *, seed=None, options=None):  # type: ignore[override]
        super().reset(seed=seed)
        self.answer = options["task"]["answer"]  # type: ignore[index]
        return self.question(), {}

    def question(self) -> Any:
        return f"Say {self.answer}."

    def reward(self, said: str) -> float:
        return float(said.strip() == self.answer)

    def step(self, action):  # type: ignore[override]
        return None, self.reward(action.text), True, False, {}

    def format_example(self, rng: np.random.Generator) -> str:
        return str(rng.choice(list(LETTERS)))


class OtherCase(Copy):
    """The answer is compared with its small letter."""

    def reward(self, said: str) -> float:
        return float(said == self.answer.lower())


class Generous(Copy):
    """The reward does not look at the answer."""

    def reward(self, said: str) -> float:
        return 1.0


class NoExample(Copy):
    """A model from random weights never learns what an answer looks like."""

    format_example = relax.Env.format_example  # type: ignore[assignment]


class Wordy(Copy):
    """The answer is a sentence, which needs more tokens than the run allows."""

    def reward(self, said: str) -> float:
        return float(said.strip() == f"the answer is {self.answer}")

    def format_example(self, rng: np.random.Generator) -> str:
        return f"the answer is {rng.choice(list(LETTERS))}"


class Endless(Copy):
    """No turn is the last one."""

    def step(self, action):  # type: ignore[override]
        return f"Again: say {self.answer}.", self.reward(action.text), False, False, {}


class OwnDice(Copy):
    """What is random does not come from the seed, so the members of a group get different questions."""

    def reset(self, *, seed=None, options=None):  # type: ignore[override]
        super().reset(seed=seed, options=options)
        self.answer = random.choice(LETTERS)
        return self.question(), {}


class OneSound(Copy):
    """The sound is made once, for all tasks."""

    modalities: ClassVar[set[str]] = {"audio"}
    SOUND: ClassVar[relax.Audio] = relax.Audio.from_array(np.sin(np.arange(16_000) / 8).astype(np.float32) / 4)

    def question(self) -> Any:
        return [self.SOUND, "which tone?"]


class Polite(Copy):
    """A reward component asks for a word that no answer of one letter can hold."""

    @relax.reward(weight=0.5)
    def polite(self, trajectory) -> float:
        return float("please" in str(trajectory.messages[-1]["content"]))


class BrokenRows(Copy):
    """Two of 64 rows cannot be played."""

    def reset(self, *, seed=None, options=None):  # type: ignore[override]
        if options["task"]["index"] in (3, 11):  # type: ignore[index]
            raise FileNotFoundError(f"no picture of task {options['task']['index']}")  # type: ignore[index]
        return super().reset(seed=seed, options=options)


class Sleepy(Copy):
    """A step waits for something slow."""

    def step(self, action):  # type: ignore[override]
        time.sleep(1.0)
        return super().step(action)


class ThreeTasks(Copy):
    """The data set is a sample of three rows."""

    tasks = staticmethod(lambda: letters(3))


class Forgetful(Copy):
    """The question does not show the task."""

    def question(self) -> Any:
        return "Say the right letter."

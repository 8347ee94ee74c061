"""Rows of the shipped environments, made once for all tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
from relax_envs import colour, higher_lower, motion, omni_quiz, tone

SOURCES: dict[str, Callable[[], Mapping[str, Any]]] = {
    "tone": tone.tasks,
    "colour": colour.tasks,
    "motion": motion.tasks,
    "motion-shuffled": motion.shuffled_tasks,
    "omni-quiz": omni_quiz.tasks,
    "higher-lower": higher_lower.tasks,
}


@pytest.fixture(scope="session")
def first_rows() -> Callable[..., list[dict[str, Any]]]:
    """`first_rows(name, n, split="train")`: rows 0 … n - 1."""

    @cache
    def row(name: str, split: str, index: int) -> dict[str, Any]:
        return SOURCES[name]()[split][index]

    return lambda name, n, split="train": [row(name, split, i) for i in range(n)]

"""Environments of the episode tests, made of single methods."""

from __future__ import annotations

from typing import Any

import numpy as np

import relax_sdk as relax


class Count(relax.Env):
    """Counts turns; over after `turns` of them."""

    system_prompt = "count"

    def __init__(self, turns: int = 1) -> None:
        self.turns, self.seen = turns, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"task {options['task']['index']}", {}

    def step(self, action):
        self.seen += 1
        return f"turn {self.seen}", 0.5, self.seen >= self.turns, False, {"seen": np.int64(self.seen), "self": self}


def env_with(**methods: Any) -> type[relax.Env]:
    """`Count` with other methods."""
    return type("Made", (Count,), methods)


def returning(value: Any) -> Any:
    """A method that returns `value`."""
    return lambda self, *_, **__: value


def raising(error: BaseException) -> Any:
    """A method that raises `error`."""

    def method(self, *_, **__):
        raise error

    return method


async def only(bench, env, *arguments, row=None, **options):
    """The one trajectory of a group of one."""
    made = bench(env, *arguments, **({"max_retries": 0} | options))
    result = await made.group(7, row)
    return result.trajectories[0], made

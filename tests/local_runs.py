"""Whole runs on this machine, at the smallest sizes, and an observer that acts while they go on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from our_processes import children
from prepared_job import prepared_job

import relax_sdk as relax

SMALL = dict(
    rollout={"groups_per_step": 4, "group_size": 4, "max_turns": 1},
    warmup={"steps": 2, "batch_size": 4},
    eval={"every": 2, "limit": 8},
    training={"checkpoint_every": 2},
)
SHORT_STEPS = SMALL["training"] | {"step_timeout": 20.0}
"""A trainer that hangs in a step is killed soon."""


SAME_WEIGHTS = 1e-4
"""Largest gap of logprobs at equal weights.

The runs that are held to it replay the engine's routes: once in a few hundred steps the router's scores of one token are so
nearly tied that rounding decides, engine and trainer take different experts, and logprobs differ by 1e-4 to 1e-2
(`tests/training/test_route_ties.py`).
"""


def trainer(folder: Path, env: str = "tone-v0", **settings) -> relax.Trainer:
    """A trainer of a run at the smallest sizes."""
    return relax.Trainer(env, folder=folder, **(SMALL | settings))


def left_behind() -> list[str]:
    """Processes of ours, and weights in shared memory."""
    serving = [process for process, command in children().items() if "serve" in command]  # of tests/api
    others = {process.pid for server in serving for process in (server, *server.children(recursive=True))}
    names = [" ".join(command) for process, command in children(recursive=True).items() if process.pid not in others]
    shared = [str(p) for p in Path("/dev/shm").glob(f"relax-{os.getpid()}-*")]
    return [n for n in names if "relax_server" in n] + shared


class Watch:
    """An observer that acts when a step is done."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self.act, self.warnings, self.steps = act, [], []

    def stage(self, text: str) -> None: ...

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def step(self, metrics: dict) -> None:
        self.steps.append(metrics["step"])
        self.act(metrics["step"])


def fit_watched(run: relax.Trainer, steps: int, act: Callable[[int], None]) -> tuple[Watch, relax.Run]:
    """`fit` with an observer of our own."""
    from relax_sdk.runtime import find_runtime

    job = prepared_job(run, steps)
    watch = Watch(act)
    find_runtime("local").fit(job, watch)
    return watch, relax.Run(job.folder, job.config, job)

"""Runs on Ray: real clusters of one node and of three, at the smallest sizes."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import psutil
import pytest

import relax_sdk as relax
from relax_sdk.runtime import Job

ray = pytest.importorskip("ray", reason="the ray runtime is optional: pip install 'relax-gym[server,ray]'")

from ray.cluster_utils import Cluster  # noqa: E402
from relax_server.journal import open_journal  # noqa: E402
from relax_server.roles.layout import RunLayout  # noqa: E402
from relax_server.roles.ray.cluster import connected  # noqa: E402
from relax_server.roles.ray.host import namespace  # noqa: E402
from relax_server.roles.ray.runtime import RayRuntime  # noqa: E402

pytestmark = pytest.mark.timeout(280)

SMALL = dict(
    rollout={"groups_per_step": 4, "group_size": 4, "max_turns": 1},
    warmup={"steps": 2, "batch_size": 4},
    eval={"every": 2, "limit": 8},
    training={"checkpoint_every": 2},
    sampling={"max_new_tokens": 2},
)


class Letters(relax.Env):
    """Name a letter. It is in no installed package, so its code must travel by value."""

    tasks = staticmethod(lambda: {"train": [{"n": n} for n in range(64)], "eval": [{"n": 0}, {"n": 1}]})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        assert __name__ not in sys.modules, "this module was imported where the episode is played"
        return "say a", {}

    def step(self, action):
        return None, float("a" in action.text.lower()), True, False, {}


class Watch:
    """An observer that acts on what it is told."""

    def __init__(self, act: Callable[[int], None] = lambda step: None, stage: Callable[[str], None] = lambda text: None) -> None:
        self.act, self.stage = act, stage
        self.warnings: list[str] = []
        self.steps: list[int] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def step(self, metrics: dict) -> None:
        self.steps.append(metrics["step"])
        self.act(metrics["step"])


def fit(folder: Path, steps: int, watch: Watch, env=Letters, **settings) -> relax.Run:
    """`Trainer.fit` with an observer of our own."""
    trainer = relax.Trainer(env, folder=folder, runtime=RayRuntime(), **(SMALL | settings))
    config = dataclasses.replace(trainer.config, steps=steps)
    job = Job(trainer.spec, config, trainer._prepare(config, resume=False))
    RayRuntime().fit(job, watch)
    return relax.Run(job.folder, config, job)


def whole(run: relax.Run, steps: int) -> None:
    """Every step was done, no group was lost or trained on twice, and nothing is left behind."""
    assert [row["step"] for row in run.metrics] == list(range(1, steps + 1))
    counts = open_journal(RunLayout(run.folder).journal).counts(run.folder.name)
    assert (counts.acked, counts.leased) == (steps * 4, 0)
    wait_until(lambda: not left_behind(), 20)


def left_behind() -> list[str]:
    """Processes of ours below this one, and those that wait to remove shared memory."""
    commands = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    ours = [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    return [c for c in ours if "relax_server" in c or "RoleActor" in c] + [
        c for c in commands if "relax_server.roles.shared_memory" in c
    ]


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def pid_of(role: str, folder: Path) -> int:
    """The process of a role, or of the engine itself."""
    if role == "engine":
        (engine,) = [p for p in psutil.Process().children(recursive=True) if "engines.embedded" in " ".join(p.cmdline())]
        return engine.pid
    actor = ray.get_actor(role, namespace(folder))
    return ray.get(actor.__ray_call__.options(concurrency_group="control").remote(lambda self: os.getpid()), timeout=30)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One node, for all tests that need no other."""
    with connected(relax.RunConfig(env="")):
        yield


def test_a_run_reports_what_the_local_runtime_does(cluster, tmp_path):
    on_ray = relax.Trainer("tone-v0", folder=tmp_path / "ray", runtime=RayRuntime(), **SMALL).fit(steps=2, progress=False)
    local = relax.Trainer("tone-v0", folder=tmp_path / "local", **SMALL).fit(steps=2, progress=False)
    assert [row.keys() for row in on_ray.metrics] == [row.keys() for row in local.metrics]
    for name in ("config.json", "reward.png", "hf", "checkpoints", "tensorboard", "timeline.json"):
        assert (on_ray.folder / name).exists(), name
    whole(on_ray, 2)


def test_each_role_that_is_killed_is_started_again_alone(cluster, tmp_path):
    folder, victims = tmp_path / "run", ["policy", "rollout", "engine", "controller"]
    killed: dict[str, int] = {}

    def kill(step: int) -> None:
        if step >= 2 * len(killed) + 2 and len(killed) < len(victims):
            role = victims[len(killed)]
            killed[role] = pid_of(role, folder)
            os.kill(killed[role], signal.SIGKILL)

    watch = Watch(kill)
    run = fit(folder, 12, watch)
    assert list(killed) == victims
    for words in ("the policy process ended", "the rollout process ended", "the engine at", "the controller ended"):
        assert sum(words in warning for warning in watch.warnings) == 1, watch.warnings
    whole(run, 12)

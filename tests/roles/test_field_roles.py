"""Reference and advantages as roles of their own: whole runs on this machine through TransferQueue, at the smallest sizes."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from relax_server.journal import open_journal
from relax_server.roles.fields import field_roles
from relax_server.roles.layout import RunLayout
from relax_sdk.spans import read_spans

import relax_sdk as relax
from relax_sdk.runtime import Job, find_runtime

pytest.importorskip("ray", reason="the package ray is not installed (pip install 'relax-gym[ray]')")
pytest.importorskip("transfer_queue", reason="the package TransferQueue is not installed (pip install 'relax-gym[ray]')")

pytestmark = pytest.mark.timeout(280)

SMALL: dict[str, Any] = dict(
    model="relax/tiny-qwen3",
    rollout={"groups_per_step": 4, "group_size": 4, "max_turns": 1},
    warmup={"steps": 2, "batch_size": 4},
    eval={"every": 0, "limit": 2},
    training={"checkpoint_every": 2},
    sampling={"max_new_tokens": 2},
    algorithm={"kl_coef": 0.1},
)


class Letters(relax.Env):
    """Name a letter."""

    tasks = staticmethod(lambda: [{"n": n} for n in range(64)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "say a", {}

    def step(self, action):
        return None, len(action.text) + float("a" in action.text.lower()), True, False, {}

    def format_example(self, rng):
        return str(rng.choice(["a", "b"]))


class Watch:
    """An observer that acts when a step is done."""

    def __init__(self, act: Callable[[int], None] = lambda step: None) -> None:
        self.act, self.warnings = act, []

    def stage(self, text: str) -> None: ...

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def step(self, metrics: dict) -> None:
        self.act(metrics["step"])


def fit(folder: Path, steps: int, watch: Watch | None = None, **settings: Any) -> relax.Run:
    trainer = relax.Trainer(Letters, folder=folder, **(SMALL | settings))
    config = dataclasses.replace(trainer.config, steps=steps)
    job = Job(trainer.spec, config, trainer._prepare(config, resume=False))
    find_runtime("local").fit(job, watch or Watch())
    return relax.Run(job.folder, config, job)


def whole(run: relax.Run, steps: int) -> None:
    """Every step was done, no group was lost or trained on twice."""
    assert [row["step"] for row in run.metrics] == list(range(1, steps + 1))
    counts = open_journal(RunLayout(run.folder).journal).counts(run.folder.name)
    assert (counts.acked, counts.leased) == (steps * 4, 0)


def kill(role: str) -> int:
    (victim,) = [p for p in psutil.Process().children() if "roles.child" in p.cmdline() and role in p.cmdline()]
    os.kill(victim.pid, signal.SIGKILL)
    return victim.pid


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_run_learns_the_same_whoever_computes_its_fields(tmp_path, kl_coef):
    """Colocate, so that both runs train on the same groups."""
    settings: dict[str, Any] = dict(mode="colocate", max_staleness=0, algorithm={"kl_coef": kl_coef})
    local = fit(tmp_path / "local", 5, **settings)
    watch = Watch()
    queued = fit(tmp_path / "queued", 5, watch, bus="transfer_queue", **settings)
    assert watch.warnings == []
    whole(queued, 5)
    for a, b in zip(local.metrics, queued.metrics, strict=True):
        for name in ("loss", "kl", "grad_norm", "reward", "entropy"):
            assert b[name] == pytest.approx(a[name], rel=2e-3, abs=1e-5), (name, a["step"])
    if kl_coef:
        assert local.metrics[-1]["kl"] > 0
    spans = {name.rpartition("-")[0]: events for name, events in read_spans(queued.folder / "timeline").items()}
    assert len(spans["advantages"]) > 0
    assert ("reference" in spans) == bool(kl_coef)
    assert all(row["seconds_fields"] >= 0 for row in queued.metrics)

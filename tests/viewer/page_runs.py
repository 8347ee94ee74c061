"""Runs for the page's tests, made through the journal: media that play, ten thousand trajectories, seeds, and nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from judged_run import make_judged
from many_runs import make_many
from relax_server.roles.events import EventLog, RunEvent
from relax_server.roles.status import RoleStatus, RunStatus
from relax_server.timeline import Timeline
from viewed_runs import make_omni

from relax_sdk.config import RunConfig

WORK = ("checkpoint", "evaluation of eval/5", "evaluation of eval/9", "features", "logprobs", "optimizer", "plan", "wait")
"""What the policy of a run did, a second each."""


def make_runs(parent: Path) -> Path:
    """A folder of runs: `omni` with media, `judged`, `seed-0` and `seed-1`, `troubled`, `empty`, and `many` with 10,000
    trajectories."""
    make_omni(parent)
    make_judged(parent)
    make_troubled(parent)
    for seed in (0, 1):
        make_seed(parent, seed)
    empty = parent / "empty"
    empty.mkdir()
    (empty / "config.json").write_text(json.dumps(dataclasses.asdict(RunConfig(env="tone-v0", steps=30))))
    make_many(parent)
    return parent


def make_seed(parent: Path, seed: int, name: str = "") -> Path:
    """A run without a journal that differs from its siblings by its seed alone."""
    folder = parent / (name or f"seed-{seed}")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(RunConfig(env="tone-v0", steps=20, seed=seed))))
    rows = [{"step": n, "time": 1000.0 + n, "reward": n / 20 + 0.05 * seed, "loss": 1 / n} for n in range(1, 21)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = Timeline(folder / "timeline", "policy")
    for at, name in enumerate(WORK):
        lines.add(name, 1000.0 + at, 1000.5 + at, 0)
    lines.close()
    return folder


def make_troubled(parent: Path) -> Path:
    """A run that has failed: its roles with a restart and logs, findings of each level, stages of steps and a staleness."""
    folder = make_seed(parent, 0, "troubled")
    rows = [
        {"step": n, "time": 1000.0 + n, "reward": 0.5, "eval_reward": 0.4, "eval_ci95": 0.1, "entropy": 0.3}
        | {"seconds_step": 1.0, "seconds_wait": 0.2, "seconds_train": 0.7, "seconds_publish": 0.1, "queue": n % 3}
        | {"staleness_mean": 0.5, "staleness_max": 2, "staleness_histogram": {"0": 6, "1": 1, "2": 1}}
        | {"failures": {"ValueError": n}, "rollout_failed_attempts": n, "n_groups": 8}
        for n in range(1, 21)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {"policy": ("running", 2), "policy-1": ("running", 2), "rollout": ("ended", 0), "engine-e1": ("lost", 1)}
    roles = [
        RoleStatus(name, "embedded" if name == "engine-e1" else name, 10, "machine", state, restarts, 1000.0, f"{name}.log")
        for name, (state, restarts) in names.items()
    ]
    status = RunStatus("failed", "", 20, 30, tuple(roles), 2.0, {}, "the engine could not be started again")
    (folder / "status.json").write_text(json.dumps({"time": 1020.0} | dataclasses.asdict(status)))
    (folder / "logs").mkdir()
    for name in names:
        (folder / "logs" / f"{name}.log").write_text("".join(f"{name} says {n}\n" for n in range(200)))
    log = EventLog(folder / "events.jsonl")
    log.add(RunEvent("started", "the run begins", 0))
    log.add(RunEvent("finding", "reward component `form` never differs", 10, "note", "leave it out"))
    log.add(RunEvent("finding", "nothing was learnt in the last 10 steps", 12, "problem", "look at the worst episodes"))
    log.add(RunEvent("restart", "the policy process ended; starting it again", 14, "note", role="policy"))
    log.add(RunEvent("failed", "the engine could not be started again", 20, "problem"))
    log.close()
    return folder

"""Runs for the page's tests, made through the journal: media that play, ten thousand trajectories, seeds, and nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from judged_run import make_judged
from many_runs import make_many
from relax_server.timeline import Timeline
from viewed_runs import make_omni

from relax_sdk.config import RunConfig

WORK = ("checkpoint", "evaluation of eval/5", "evaluation of eval/9", "features", "logprobs", "optimizer", "plan", "wait")
"""What the policy of a run did, a second each."""


def make_runs(parent: Path) -> Path:
    """A folder of runs: `omni` with media, `judged`, `seed-0` and `seed-1`, `empty`, and `many` with 10,000 trajectories."""
    make_omni(parent)
    make_judged(parent)
    for seed in (0, 1):
        make_seed(parent, seed)
    empty = parent / "empty"
    empty.mkdir()
    (empty / "config.json").write_text(json.dumps(dataclasses.asdict(RunConfig(env="tone-v0", steps=30))))
    make_many(parent)
    return parent


def make_seed(parent: Path, seed: int) -> Path:
    """A run without a journal that differs from its siblings by its seed alone."""
    folder = parent / f"seed-{seed}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(RunConfig(env="tone-v0", steps=20, seed=seed))))
    rows = [{"step": n, "time": 1000.0 + n, "reward": n / 20 + 0.05 * seed, "loss": 1 / n} for n in range(1, 21)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = Timeline(folder / "timeline", "policy")
    for at, name in enumerate(WORK):
        lines.add(name, 1000.0 + at, 1000.5 + at, 0)
    lines.close()
    return folder

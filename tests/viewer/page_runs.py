"""Runs for the page's tests, made through the journal: media that play, ten thousand trajectories, seeds, and nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from judged_run import make_judged
from many_runs import make_many
from relax_server.journal import open_journal
from relax_server.timeline import Timeline
from viewed_runs import make_group, make_run

from relax_sdk.config import RunConfig
from relax_sdk.media import Audio, Image, MediaRef, MediaStore, Video

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


def make_omni(parent: Path) -> Path:
    """A run of two groups whose sound and film are long enough to be heard and seen."""
    folder = make_run(parent, "omni", groups=2)
    media = playable(folder)
    with_media = open_journal(folder / "journal.db")
    with_media.commit(make_group(7, "omni", folder / "hf", media), "omni")
    with_media.close()
    return folder


def playable(folder: Path) -> list[MediaRef]:
    """A picture, two seconds of a rising tone, and two seconds of film."""
    store, x = MediaStore(folder / "media"), np.linspace(0, 2, 32_000, dtype=np.float32)
    y, z = np.mgrid[0:48, 0:64].astype(np.uint8)
    picture = np.stack([y * 5, z * 4, np.full_like(y, 90)], axis=-1)
    frames = np.stack([np.roll(picture, 4 * n, axis=1) for n in range(16)])
    sweep = (0.5 * np.sin(2 * np.pi * (300 + 500 * x) * x)).astype(np.float32)
    return [
        store.put(item)
        for item in (Image.from_array(picture), Audio.from_array(sweep, 16_000), Video.from_array(frames, fps=8.0))
    ]


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

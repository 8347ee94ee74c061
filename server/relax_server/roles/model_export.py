"""`relax export RUN`: a checkpoint as a model folder, written by a process of its own, as Megatron changes torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import relax_sdk.errors as errors
from relax_sdk.config import RunConfig
from relax_sdk.model_export import ExportedModel, ModelExport
from relax_server.loading_time import seconds_to_load
from relax_server.models.catalog import resolve_model
from relax_server.roles.layout import RunLayout
from relax_server.roles.process import thread_limits

EXPORT_SECONDS = 600.0
"""For an export, besides reading and writing what it takes."""


def find_checkpoint(layout: RunLayout, step: int | None) -> Path:
    """The folder of a checkpoint that a run has kept; None: of the last.

    Raises:
        ConfigError: there is none of that step; the message names those that exist.
    """
    kept = {int(path.name.removeprefix("step_")): path for path in layout.checkpoints()}
    if not kept:
        raise errors.ConfigError(f"{layout.folder} has no checkpoint yet; training.checkpoint_every says when one is written")
    if step is None:
        return kept[max(kept)]
    if step not in kept:
        there = ", ".join(str(number) for number in sorted(kept))
        raise errors.ConfigError(
            f"{layout.folder} has no checkpoint of step {step}; it has: {there}. More are kept with training.keep_checkpoints"
        )
    return kept[step]


def export_model(config: RunConfig, layout: RunLayout, request: ModelExport) -> ExportedModel:
    """Write a model folder, see `relax_sdk.model_export`. The process sees no GPU, which may not hold a model of many ranks."""
    if request.to.exists() and (not request.to.is_dir() or any(request.to.iterdir())):
        raise errors.ConfigError(f"{request.to} holds something; name a folder that does not exist yet")
    checkpoint = find_checkpoint(layout, request.checkpoint)
    asked = {
        "run": str(layout.folder),
        "model": str(resolve_model(config.model, config.seed, config.media)),
        "checkpoint": str(checkpoint),
        "to": str(request.to),
        "shard_size": request.shard_size,
    }
    command = [sys.executable, "-m", "relax_server.training.export"]
    limit = seconds_to_load(EXPORT_SECONDS, checkpoint, checkpoint)
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=limit,
            env=os.environ | thread_limits(config.training.threads) | {"CUDA_VISIBLE_DEVICES": ""},
        )
    except subprocess.TimeoutExpired as error:
        raise errors.TrainingError(f"{checkpoint}: it was not exported within {limit:.0f} s, and was given up") from error
    if done.returncode != 0:
        end = "\n".join(done.stderr.splitlines()[-5:])
        raise errors.TrainingError(f"{checkpoint}: the process that exports it ended with {done.returncode}: {end}")
    answer = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["message"])
    return ExportedModel(request.to, answer["step"], tuple(answer["files"]))

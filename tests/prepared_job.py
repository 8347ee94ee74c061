"""A job as `Trainer.fit` makes it, for tests that bring an observer or a controller of their own."""

from __future__ import annotations

import dataclasses

import relax_sdk as relax
from relax_sdk.runtime import Job


def prepared_job(trainer: relax.Trainer, steps: int, resume: bool = False) -> Job:
    """The run folder is made and the configuration written; the folder is not locked."""
    config = dataclasses.replace(trainer.config, steps=steps)
    folder = trainer._run_folder(config, resume)
    trainer._prepare(folder, config, resume)
    return Job(trainer.spec, config, folder, resume=resume)

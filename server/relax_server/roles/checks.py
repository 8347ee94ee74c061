"""What is refused before a run begins."""

from __future__ import annotations

from pathlib import Path

from relax_sdk.config import RunConfig
from relax_sdk.errors import ConfigError
from relax_sdk.runtime import Job
from relax_server.journal.base import Journal


def check_modalities(job: Job, model_path: Path) -> None:
    """Refuse an environment whose media the model cannot take.

    Raises:
        ConfigError: it cannot.
    """
    from relax_server.models.processor import Processor

    needed = set(job.spec.load().modalities)
    missing = needed - Processor.load(model_path).modalities
    if missing:
        raise ConfigError(
            f"environment {job.spec.id} shows {sorted(needed)}, but the model {job.config.model} takes no {sorted(missing)}"
        )


def check_hearing(config: RunConfig) -> None:
    """Refuse films with sound for an engine that does not hear them.

    Raises:
        ConfigError: it does not; the message names one that does.
    """
    if config.media.use_audio_in_video and config.engine != "embedded":
        raise ConfigError(
            f"media.use_audio_in_video = True: engine={config.engine!r} does not hear films here; use engine='embedded'"
        )


def check_division(config: RunConfig, model_path: Path) -> None:
    """Refuse a layout that the model cannot be divided in.

    Raises:
        ConfigError: the field, its value, and what the model has.
    """
    from relax_server.models.division import check_layout
    from relax_server.models.families import family_of
    from relax_server.models.processor import Processor

    hf_config = Processor.load(model_path).hf_config
    check_layout(family_of(hf_config.model_type).text(hf_config), config.layout)


def algorithm_notes(config: RunConfig) -> list[str]:
    """What a user should know of settings that are allowed, but do less than one may think."""
    algorithm = config.algorithm
    if config.max_staleness and algorithm.old_logprobs == "recompute" and algorithm.updates_per_batch == 1:
        return [
            "algorithm.old_logprobs='recompute' with one update per batch: the ratio is 1 by its definition, so clip_low, "
            f"clip_high and dual_clip do nothing, and only correction={algorithm.correction!r} (tis_clip={algorithm.tis_clip}) "
            "acts on stale tokens; old_logprobs='engine' clips them"
        ]
    return []


def check_engine(config: RunConfig) -> None:
    """Refuse an engine that is not installed on this machine.

    Raises:
        ConfigError: it is not; the message holds the command that installs it.
    """
    from relax_server.engines.foreign import ForeignProcess
    from relax_server.engines.kinds import PROCESSES

    process = PROCESSES[config.engine]
    if issubclass(process, ForeignProcess):
        process.venv.find()


def check_journal(job: Job, shared: str | None, journal: Journal) -> None:
    """Refuse a journal of several runs that has one of this name.

    Args:
        job: the run.
        shared: where the journal is, if it is not the run's own.
        journal: open.

    Raises:
        ConfigError: it has.
    """
    name = job.folder.name
    if shared is not None and not job.resume and journal.groups(name, limit=1):
        raise ConfigError(f"the journal holds a run named {name!r} already; give the folder of this one another name")

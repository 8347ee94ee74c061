"""`check_senses`: plays the blindness check with a model, keeps it in a folder, and judges."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

from relax_sdk.config import RunConfig
from relax_sdk.endpoint import Endpoint
from relax_sdk.env import Env
from relax_sdk.evals.plan import EvalPlan, beside, default_folder, keep_plan
from relax_sdk.evals.play import Subject, find_subject
from relax_sdk.evals.report import write_whole
from relax_sdk.evals.senses import SensesReport, SensesResults, judge
from relax_sdk.origin import keep_origin
from relax_sdk.progress import Waiting
from relax_sdk.registry import EnvSpec, require_split
from relax_sdk.run import CONFIG, SENSES, WEIGHTS
from relax_sdk.run_lock import Holder, RunLock, cannot_write
from relax_sdk.runtime import Job, Tell, find_runtime
from relax_sdk.tracebacks import short_traceback

LIMIT = 128
"""Tasks of a check if nothing else is said; there are seven passes over them or more."""


class SensesPlayer(Protocol):
    """Plays the passes of a check; the `local` runtime does."""

    def play_senses(self, job: Job, plan: EvalPlan, model: str, tell: Tell) -> SensesResults:
        """Play all passes; their episodes are durable in the job's folder."""
        ...


@short_traceback
def check_senses(
    what: str | os.PathLike[str] | type[Env] | EnvSpec,
    model: str | os.PathLike[str] | Endpoint | None = None,
    *,
    split: str = "eval",
    limit: int | None = None,
    env: str | type[Env] | EnvSpec | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
    **settings: Any,
) -> SensesReport:
    """Say whether a policy uses the images, sounds and films that an environment shows it.

    The tasks are played as they are; then with each kind of media blanked, shuffled between tasks and swapped with the
    neighbour's, each kind alone; and once with another task's observations, which gives the reward of knowing nothing. The
    environment itself is not changed and scores against its true task. Answers are greedy.

        print(relax.check_senses("runs/tone"))
        print(relax.check_senses("tone-v0", relax.Endpoint(model="gpt-audio"), limit=64))

    Args:
        what: an environment, or the folder of a run, whose trained weights are then played.
        model: as in `evaluate`; the folder of a run stands for its trained weights.
        split: of the tasks.
        limit: tasks at most; default: 128, or `eval.limit` where that is less.
        env: the environment of a run's folder that cannot load its own.
        out: the folder in which episodes, `senses.json` and `senses.md` are kept; default: one in `evals/`.
        progress: show a live line.
        **settings: as in `evaluate`.

    Raises:
        ConfigError: no such split, a setting outside its range, or the folder holds something else.
        RegistryError: the environment cannot be loaded.
        RunError: no episode of a pass was usable.
    """
    if isinstance(model, (str, os.PathLike)) and (Path(model) / CONFIG).is_file() and (Path(model) / WEIGHTS).is_dir():
        what, model, env = Path(model), None, None if isinstance(what, os.PathLike) else what
    subject = find_subject(what, model if model is None or isinstance(model, Endpoint) else str(model), env, settings)
    require_split(subject.spec, split)
    subject = replace(subject, plan=replace(subject.plan, split=split, limit=limit or default_limit(subject.config)))
    player = cast(SensesPlayer, find_runtime("local"))
    named = subject.plan.label or subject.config.model
    with Waiting(f"senses of {named} in {subject.spec.id}", progress) as waiting:
        return check_subject(subject, None if out is None else Path(out), player.play_senses, waiting.tell)


def default_limit(config: RunConfig) -> int:
    """Tasks of a check if nothing else is said."""
    return min(config.eval.limit, LIMIT)


def check_subject(
    subject: Subject, out: Path | None, play: Callable[[Job, EvalPlan, str, Tell], SensesResults], tell: Tell
) -> SensesReport:
    """Play the check in a folder, and keep the report there.

    Args:
        subject: what is checked; its plan says with which tasks.
        out: the folder; None: one in `evals/`.
        play: as `SensesPlayer.play_senses`.
        tell: told how far it is.

    Raises:
        ConfigError: the folder cannot be written, or holds something else.
        RunError: no episode of a pass was usable.
    """
    spec, config = subject.spec, replace(subject.config, ray=replace(subject.config.ray, journal=None))
    config = subject.plan.sampled(config, temperature_given=False)
    identity = subject.plan.identity(spec, config) | {"check": "senses", "limit": subject.plan.limit}
    folder = out.resolve() if out is not None else beside(default_folder(identity).resolve())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with RunLock(folder, Holder.here()) as lock:
            keep_plan(folder, identity)
            write_whole(folder / CONFIG, json.dumps(config.to_dict(), indent=1))
            keep_origin(spec, subject.agent, folder)
            job = Job(spec, config, folder, subject.agent, holder=lock.holder)
            report = judge(play(job, subject.plan, identity["model"], tell))
            save(report, folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return report


def save(report: SensesReport, folder: Path) -> None:
    """Write `senses.json` and `senses.md`.

    Raises:
        OSError: the folder cannot be written.
    """
    write_whole(folder / SENSES, json.dumps(report.to_dict(), indent=1))
    write_whole((folder / SENSES).with_suffix(".md"), report.to_markdown())

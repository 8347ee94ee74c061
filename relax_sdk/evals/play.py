"""`evaluate`: plays a split with a model, in a folder in which it goes on when it was ended, and reports."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

from relax_sdk.config import RunConfig
from relax_sdk.endpoint import Endpoint
from relax_sdk.env import Env
from relax_sdk.errors import ConfigError, RunError
from relax_sdk.evals.plan import EvalPlan, beside, default_folder, keep_plan
from relax_sdk.evals.report import EvalEpisode, EvalReport, write_whole
from relax_sdk.evaluation import Played
from relax_sdk.origin import AgentLike, keep_origin, load_origin
from relax_sdk.progress import Waiting
from relax_sdk.registry import EnvSpec, require_split
from relax_sdk.run import CONFIG, WEIGHTS, read_config
from relax_sdk.run_lock import Holder, RunLock, cannot_write
from relax_sdk.runtime import Job, Tell, find_runtime
from relax_sdk.tracebacks import short_traceback
from relax_sdk.trainer import Trainer


@dataclass(frozen=True)
class EvalResults:
    """What the player of an evaluation gives back."""

    episodes: list[EvalEpisode]
    """By task and sample, those of earlier starts included."""
    of: int
    """Tasks of the split, at most the plan's limit."""
    by: str | None
    """The column whose values `EvalEpisode.tags` are."""


class EvalPlayer(Protocol):
    """Plays evaluations; the `local` runtime does."""

    def play_evaluation(self, job: Job, plan: EvalPlan, tell: Tell, on_played: Callable[[Played], None]) -> EvalResults:
        """Play what the job's folder does not hold yet; each task is durable there as soon as it is over."""
        ...


@dataclass(frozen=True)
class Subject:
    """What is evaluated, and where it comes from."""

    spec: EnvSpec
    config: RunConfig
    agent: AgentLike
    plan: EvalPlan


@short_traceback
def evaluate(
    what: str | os.PathLike[str] | type[Env] | EnvSpec,
    model: str | Endpoint | None = None,
    *,
    split: str = "eval",
    limit: int | None = None,
    samples: int = 1,
    success: float = 1.0,
    by: str | None = None,
    env: str | type[Env] | EnvSpec | None = None,
    out: str | os.PathLike[str] | None = None,
    fresh: bool = False,
    progress: bool = True,
    **settings: Any,
) -> EvalReport:
    """Play a split of an environment with a model, and report.

    Everything is kept in a folder: episodes as they end (a journal, as runs have), media, `report.json` and `report.md`. The
    same call goes on where it was ended; tasks with episodes that failed are played again then.

        relax.evaluate("tone-v0", "my-model-folder", samples=8)
        relax.evaluate("tone-v0", relax.Endpoint("http://127.0.0.1:8000/v1", "my-model"))
        relax.evaluate("runs/tone")

    Args:
        what: an environment (registered name, `"package.module:Class"`, class or spec), or the folder of a run, whose trained
            weights are then played.
        model: a built-in name, a Hugging Face folder, or an `Endpoint`; default: the environment's own, or the run's.
        split: of the tasks.
        limit: tasks at most, the first ones; default: `eval.limit`.
        samples: episodes of each task; one is played greedily, several with the temperature of `sampling`.
        success: reward from which on an episode has succeeded, for pass@k.
        by: column of the task rows that scores are also given by; default: `tag`, `tags` or `category`, where there is one.
        env: the environment of a run's folder that cannot load its own.
        out: the folder; default: `evals/ENV-MODEL-HASH` with a hash of all that decides what is played.
        fresh: play again what was played already, in a folder beside.
        progress: show a live line.
        **settings: sections of `RunConfig`, such as `sampling={"temperature": 0.7}`, and `engine`, `engine_flags`, `seed`.

    Raises:
        ConfigError: no such split, or a setting outside its range; or the folder was begun with another configuration.
        RegistryError: the environment cannot be loaded.
        RunError: no episode was usable.
    """
    subject = find_subject(what, model, env, settings)
    spec, config = subject.spec, subject.config
    require_split(spec, split)
    plan = replace(subject.plan, split=split, limit=limit or config.eval.limit, samples=samples, success=success, by=by)
    config = plan.sampled(config, "temperature" in dict(_fields(settings.get("sampling"))))
    return play(replace(subject, config=config, plan=plan), None if out is None else Path(out), fresh, progress)


def play(subject: Subject, out: Path | None, fresh: bool, progress: bool) -> EvalReport:
    """Play in a folder, and write the report there, also when it is stopped.

    Args and raises: as `evaluate`'s.
    """
    spec, plan = subject.spec, subject.plan
    config = replace(subject.config, ray=replace(subject.config.ray, journal=None))  # the folder has a journal of its own
    identity = plan.identity(spec, config)
    folder = (out or default_folder(identity)).resolve()
    folder = beside(folder) if fresh else folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with RunLock(folder, Holder.here()) as lock:
            keep_plan(folder, identity)
            write_whole(folder / CONFIG, json.dumps(config.to_dict(), indent=1))
            keep_origin(spec, subject.agent, folder)
            job = Job(spec, config, folder, subject.agent, holder=lock.holder)
            results = _play(job, plan, identity["model"], progress)
            report = EvalReport(
                folder.name,
                spec.id,
                identity["model"],
                plan.split,
                identity,
                results.of,
                plan.success,
                results.by,
                results.episodes,
                folder,
            )
            report.save(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
    if all(episode.failure is not None for episode in report.episodes):
        last = report.episodes[-1].error if report.episodes else "no tasks"
        where = f"evaluation of {spec.id} with {identity['model']}"
        raise RunError(f"{where}: none of {len(report.episodes)} episodes was usable; the last failure: {last}")
    return report


def _play(job: Job, plan: EvalPlan, model: str, progress: bool) -> EvalResults:
    player = cast(EvalPlayer, find_runtime("local"))
    with Waiting(f"evaluation of {job.spec.id} [{plan.split}] with {Path(model).name}", progress) as waiting:
        return player.play_evaluation(job, plan, waiting.tell, lambda played: waiting.tell(str(played)))


def find_subject(
    what: str | os.PathLike[str] | type[Env] | EnvSpec,
    model: str | Endpoint | None,
    env: str | type[Env] | EnvSpec | None,
    settings: Mapping[str, Any],
) -> Subject:
    """The environment, the settings and the model that `evaluate` is to play with.

    Raises:
        ConfigError: a setting that there is not, or outside its range; `env` beside an environment; a run without weights.
        RegistryError: the environment cannot be loaded.
    """
    if isinstance(what, (str, os.PathLike)) and (Path(what) / CONFIG).is_file():
        return _of_run(Path(what).resolve(), model, env, settings)
    if isinstance(what, os.PathLike):
        raise ConfigError(f"{what} is not the folder of a run (no {CONFIG} in it)")
    if env is not None:
        raise ConfigError(f"env={env!r} goes with the folder of a run, and {what!r} is none")
    named = model if isinstance(model, str) else None
    trainer = Trainer(what, named, **settings)
    if isinstance(model, Endpoint):
        return Subject(trainer.spec, replace(trainer.config, model=model.model), None, EvalPlan(endpoint=model))
    return Subject(trainer.spec, trainer.config, None, EvalPlan())


def _of_run(
    folder: Path, model: str | Endpoint | None, env: str | type[Env] | EnvSpec | None, settings: Mapping[str, Any]
) -> Subject:
    """A run's environment, agent and settings, with its trained weights or with another model."""
    config = read_config(folder)
    spec, agent = load_origin(folder, config.env, env)
    known = {name: dict(fields) for name, fields in config.to_dict().items() if isinstance(fields, dict)}
    merged = {name: known.get(name, {}) | dict(_fields(fields)) for name, fields in settings.items() if name in known}
    top = dict(engine=config.engine, engine_flags=config.engine_flags, seed=config.seed)
    others = top | {name: value for name, value in settings.items() if name not in known}
    named = model if isinstance(model, str) else config.model
    changed = Trainer(spec, named, agent=agent, **{**known, **merged, **others}).config
    if isinstance(model, Endpoint):
        return Subject(spec, replace(changed, model=model.model), agent, EvalPlan(endpoint=model))
    if model is not None:
        return Subject(spec, changed, agent, EvalPlan())
    weights = folder / WEIGHTS
    if not weights.exists():
        raise ConfigError(f"{folder} has no trained weights yet (no {WEIGHTS}/ folder); name a model with --model")
    return Subject(spec, changed, agent, EvalPlan(weights=weights, version=config.steps, label=folder.name))


def _fields(section: Any) -> Mapping[str, Any]:
    if section is None or isinstance(section, Mapping):
        return section or {}
    return dict(vars(section))

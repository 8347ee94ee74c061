"""`Trainer`: one class from an environment to a trained model."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from relax_sdk.config import (
    AlgorithmConfig,
    AutoscaleConfig,
    BusName,
    EngineKind,
    EvalConfig,
    Mode,
    OptimizerConfig,
    RayConfig,
    RolloutConfig,
    RunConfig,
    SamplingParams,
    TrackingConfig,
    TrainingConfig,
    WarmupConfig,
    from_dict,
    run_config_from_dict,
)
from relax_sdk.defaults import SCRATCH, sections_for
from relax_sdk.devices import DevicesConfig
from relax_sdk.env import Env
from relax_sdk.errors import ConfigError
from relax_sdk.layout import LayoutConfig
from relax_sdk.loading import refuse_while_importing
from relax_sdk.media_config import MediaConfig
from relax_sdk.origin import keep_origin, load_origin
from relax_sdk.progress import Progress
from relax_sdk.registry import EnvSpec, get_spec
from relax_sdk.run import CONFIG, Run, read_config
from relax_sdk.run_lock import Holder, RunLock, cannot_write
from relax_sdk.runtime import Job, Provide, Runtime, find_runtime
from relax_sdk.tracebacks import short_traceback
from relax_sdk.tuning import LoraConfig, TowersConfig

SECTIONS: dict[str, type[Any]] = {
    "sampling": SamplingParams,
    "rollout": RolloutConfig,
    "algorithm": AlgorithmConfig,
    "optimizer": OptimizerConfig,
    "training": TrainingConfig,
    "layout": LayoutConfig,
    "devices": DevicesConfig,
    "media": MediaConfig,
    "eval": EvalConfig,
    "warmup": WarmupConfig,
    "autoscale": AutoscaleConfig,
    "ray": RayConfig,
    "tracking": TrackingConfig,
    "lora": LoraConfig,
    "towers": TowersConfig,
}


class Trainer:
    """Trains a model on an environment.

        relax.Trainer(env="tone-v0").fit(steps=200)

    Args:
        env: a registered name, `"package.module:Class"`, or an `Env` class.
        model: `relax/tiny-omni` and other built-in names, or a Hugging Face model folder.
        algorithm: `"grpo"`, `"dr_grpo"`, `"rloo"`, or an `AlgorithmConfig`.
        max_staleness: how many published optimizer steps old a group may be when it is trained on; 0 is on-policy.
        mode: `async` overlaps rollouts and training; `colocate` alternates them and needs `max_staleness=0`.
        agent: `async def agent(session)` that plays an episode instead of the built-in chat and tool loops; or a command such
            as `"python my_agent.py"`, started for every episode with `OPENAI_BASE_URL` and `OPENAI_API_KEY` in its environment.
        seed: of weights, episodes and data order.
        engine: what generates: `embedded`, our own small server, or a real SGLang or vLLM server (`docs/engines.md`).
        engine_flags: more flags for the command line of SGLang or vLLM, such as `["--tp", "2"]`.
        engines: how many of them.
        engine_hosts: hosts besides this machine from which engines may be added to the run by their URL.
        bus: how groups reach the trainer: `local`, straight from the journal; `transfer_queue`, through TransferQueue on Ray.
        folder: where the run is kept; default `runs/<env>-<time>`.
        runtime: who carries the run out; `local` is this machine, `ray` a Ray cluster.
        server: URL of a rollout service that carries the run out instead; it goes on there when this program ends.
        key: for the service, where it wants one.
        provide: how the environment gets to the service. `host`: it stays in this process, and the service steps it, so the
            run waits while this program is away. `upload`: its code is sent. `installed`: the service has it. Default:
            `installed` for those that ship with Relax Gym, else `host`.
        lora: adapters to train in place of the model, such as `{"rank": 16}` (`docs/lora.md`).
        devices: which GPUs trainer, engines and reference compute on, such as `{"trainer": [0, 1], "engines": [2, 3]}`.
        towers: whether the towers of an omni model are trained, and how fast.
        sampling, rollout, optimizer, training, layout, media, eval, warmup, autoscale, ray, tracking: as those two, a
            configuration object, or a dictionary of the fields to change; what is left out comes from the environment's own
            defaults, and otherwise suits a pretrained model, adapters, or random weights in `relax/tiny-…`
            (`relax_sdk.defaults`). An object is taken as it is.

    Raises:
        ConfigError: a value outside its range, or settings that contradict each other.
        RegistryError: unknown environment.
    """

    def __init__(
        self,
        env: str | type[Env] | EnvSpec,
        model: str | None = None,
        *,
        algorithm: str | AlgorithmConfig | Mapping[str, Any] | None = None,
        max_staleness: int | None = None,
        mode: Mode | None = None,
        agent: Callable[..., Any] | str | Sequence[str] | None = None,
        seed: int = 0,
        engine: EngineKind | None = None,
        engine_flags: Sequence[str] = (),
        engines: int = 1,
        engine_hosts: Sequence[str] = (),
        bus: BusName = "local",
        folder: str | os.PathLike[str] | None = None,
        runtime: str | Runtime = "local",
        server: str | None = None,
        key: str | None = None,
        provide: Provide | None = None,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        rollout: RolloutConfig | Mapping[str, Any] | None = None,
        optimizer: OptimizerConfig | Mapping[str, Any] | None = None,
        training: TrainingConfig | Mapping[str, Any] | None = None,
        layout: LayoutConfig | Mapping[str, Any] | None = None,
        devices: DevicesConfig | Mapping[str, Any] | Literal["auto"] = "auto",
        media: MediaConfig | Mapping[str, Any] | None = None,
        eval: EvalConfig | Mapping[str, Any] | None = None,
        warmup: WarmupConfig | Mapping[str, Any] | None = None,
        autoscale: AutoscaleConfig | Mapping[str, Any] | None = None,
        ray: RayConfig | Mapping[str, Any] | None = None,
        tracking: TrackingConfig | Mapping[str, Any] | None = None,
        lora: LoraConfig | Mapping[str, Any] | None = None,
        towers: TowersConfig | Mapping[str, Any] | None = None,
    ) -> None:
        self.spec = get_spec(env)
        if isinstance(algorithm, str):
            algorithm = {"advantage": algorithm}
        given = dict(
            sampling=sampling,
            rollout=rollout,
            algorithm=algorithm,
            optimizer=optimizer,
            training=training,
            layout=layout,
            devices=None if devices == "auto" else devices,
            media=media,
            eval=eval,
            warmup=warmup,
            autoscale=autoscale,
            ray=ray,
            tracking=tracking,
            lora=lora,
            towers=towers,
        )
        defaults = dict(self.spec.defaults)
        unknown = set(defaults) - set(SECTIONS) - {"model", "steps", "mode", "max_staleness", "engine", SCRATCH}
        if unknown:
            raise ConfigError(f"{self.spec.id}: unknown defaults {sorted(unknown)}; there are {sorted(SECTIONS)}")
        chosen_model: str = model or defaults.get("model") or "relax/tiny-omni"
        adapters = _section("lora", defaults.get("lora"), lora).rank > 0
        unchosen = sections_for(chosen_model, defaults, adapters)
        sections = {name: _section(name, unchosen.get(name), given[name]) for name in SECTIONS}
        chosen: Mode = mode if mode is not None else defaults.get("mode", "async")
        stale: int = defaults.get("max_staleness", 0 if chosen == "colocate" else 1)
        self.config = RunConfig(
            env=self.spec.id,
            model=chosen_model,
            steps=defaults.get("steps", 200),
            seed=seed,
            mode=chosen,
            max_staleness=max_staleness if max_staleness is not None else stale,
            engine=engine or defaults.get("engine", "embedded"),
            engine_flags=engine_flags,  # type: ignore[arg-type]
            engines=engines,
            engine_hosts=engine_hosts,  # type: ignore[arg-type]
            bus=bus,
            **sections,
        )
        self.agent = agent
        self.runtime = runtime
        if server is not None:
            from relax_sdk.remote import ServiceRuntime

            self.runtime = ServiceRuntime(server, key, provide)
        elif key is not None or provide is not None:
            raise ConfigError("key and provide say how a service is used; name it with server=…")
        self._folder = Path(folder) if folder is not None else None

    @short_traceback
    def fit(self, steps: int | None = None, *, resume: bool = False, progress: bool = True) -> Run:
        """Train, and return the run. Works in scripts and in notebooks.

        Args:
            steps: optimizer steps; default: the environment's own.
            resume: go on from the last checkpoint in `folder`.
            progress: show a live line.

        Raises:
            ConfigError: the sampling is greedy; the folder cannot be written, or is in use by another run.
            RunError: the run ended early; it can be resumed.
        """
        refuse_while_importing("fit()")
        runtime = find_runtime(self.runtime)
        config = dataclasses.replace(self.config, steps=steps) if steps is not None else self.config
        config.check_trainable()
        folder = self._run_folder(config, resume)
        with RunLock(folder, Holder.here()) as lock:
            self._prepare(folder, config, resume)
            name = self.runtime if isinstance(self.runtime, str) else "local"
            job = Job(self.spec, config, folder, self.agent, resume, name, lock.holder)
            run = Run(folder, config, job, self.runtime)
            with Progress(config, folder, progress) as observer:
                if not lock.enforced:
                    observer.warn(f"the file system of {folder} has no locks; the claim in the journal alone keeps others away")
                began = time.time()
                try:
                    runtime.fit(job, observer)
                except KeyboardInterrupt:
                    raise  # whoever stops a run is not to wait for a figure, which takes seconds
                except BaseException:
                    run.try_plot(observer.warn)
                    raise
                run.try_plot(observer.warn)
                if config.eval.check_senses:
                    from relax_sdk.doctor import senses_findings

                    observer.last_words = [f"senses, {finding.sentence}" for finding in senses_findings(folder, began)]
        return run

    @classmethod
    def from_run(
        cls,
        folder: str | os.PathLike[str],
        env: str | type[Env] | EnvSpec | None = None,
        *,
        change: Mapping[str, Mapping[str, Any]] | None = None,
        **service: Any,
    ) -> Trainer:
        """A trainer set up as an earlier run was, to go on with `fit(resume=True)`.

        Args:
            folder: of the run.
            env: in place of what the folder remembers of its environment.
            change: fields of sections to change, such as `{"optimizer": {"lr": 1e-4}}`. What the checkpoint depends on may
                not change; the error then names it.
            **service: `server`, `key` and `provide` of a run that a service carries out.

        Raises:
            ConfigError: not a run folder; an unknown section or field, or a value outside its range.
            RegistryError: its environment cannot be loaded; the message says how to give it.
        """
        path = Path(folder).resolve()
        values = read_config(path).to_dict()
        for name, fields in (change or {}).items():
            if name not in SECTIONS:
                raise ConfigError(f"no section {name!r} to change; there are {', '.join(SECTIONS)}")
            values[name] = values[name] | dict(fields)
        config = run_config_from_dict(values)
        spec, agent = load_origin(path, config.env, env)
        settings: dict[str, Any] = {"agent": agent, **service}
        trainer = cls(spec, folder=path, **settings)
        trainer.config = config
        return trainer

    def _run_folder(self, config: RunConfig, resume: bool) -> Path:
        """The folder of the run, made if it is a new one."""
        if resume:
            if self._folder is None:
                raise ConfigError("fit(resume=True) needs Trainer(folder=…), the folder of the run to go on with")
            read_config(self._folder)
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        named = re.sub(r"[^\w-]+", "-", re.sub(r"^.*/([^/]*)\.py:", r"\1:", config.env))
        folder = self._folder or Path("runs") / f"{named}-{stamp}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from error
        return folder.resolve()

    def _prepare(self, folder: Path, config: RunConfig, resume: bool) -> None:
        """Write the configuration into the folder, once nobody else carries a run out there."""
        if resume:
            _check_resumable(folder, config)
        elif (folder / CONFIG).exists():
            raise ConfigError(f"{folder} already holds a run; use fit(resume=True) to go on with it, or another folder")
        try:
            (folder / CONFIG).write_text(json.dumps(config.to_dict(), indent=1))
            keep_origin(self.spec, self.agent, folder)
        except OSError as error:
            raise cannot_write(folder, error) from error


def _section(name: str, default: Any, given: Any) -> Any:
    cls = SECTIONS[name]
    if isinstance(given, cls):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{name} must be a {cls.__name__} or a dictionary of its fields, got {type(given).__name__}")
    return from_dict(cls, dict(default or {}) | dict(given or {}), name)


def _check_resumable(folder: Path, config: RunConfig) -> None:
    old = read_config(folder)
    for name in ("env", "model", "seed"):
        if getattr(old, name) != getattr(config, name):
            raise ConfigError(f"{folder} was begun with {name}={getattr(old, name)!r}, not {getattr(config, name)!r}")

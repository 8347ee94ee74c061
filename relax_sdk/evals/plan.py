"""`EvalPlan`: what an evaluation plays; its folder remembers it, and goes on only with the same."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from relax_sdk.config import RunConfig
from relax_sdk.endpoint import Endpoint
from relax_sdk.errors import ConfigError
from relax_sdk.evals.report import write_whole
from relax_sdk.registry import EnvSpec

PLAN = "evaluation.json"
"""The file of an evaluation's folder that says what is played there."""
TAG_COLUMNS = ("tag", "tags", "category")
"""Columns of the task rows that scores are given by if nothing else is said: the first of them that there is."""


@dataclass(frozen=True)
class EvalPlan:
    """What an evaluation plays."""

    split: str = "eval"
    limit: int = 256
    """Tasks at most, the first ones."""
    samples: int = 1
    """Episodes of each task."""
    success: float = 1.0
    """Reward from which on an episode has succeeded, for pass@k."""
    by: str | None = None
    """Column of the task rows that scores are given by; None: the first of `TAG_COLUMNS` that there is."""
    endpoint: Endpoint | None = None
    """What is asked; None: an engine that is started with `weights`."""
    weights: Path | None = None
    """A Hugging Face folder; None: those of `RunConfig.model`."""
    version: int = 0
    """The version of the weights: the optimizer steps of the run that they are from."""
    label: str = ""
    """What the model is called in reports; default: its name in `RunConfig`."""

    def __post_init__(self) -> None:
        for name in ("limit", "samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}; allowed: 1 or more")

    def sampled(self, config: RunConfig, temperature_given: bool) -> RunConfig:
        """The configuration with the temperature that suits: 0 for one sample a task, unless one was asked for.

        Raises:
            ConfigError: several samples of a task at temperature 0, which would all be the same.
        """
        if self.samples == 1 and not temperature_given:
            return replace(config, sampling=replace(config.sampling, temperature=0.0))
        if self.samples > 1 and config.sampling.temperature == 0:
            raise ConfigError(
                f"samples = {self.samples} with sampling.temperature = 0: all samples of a task would be the same"
            )
        return config

    def identity(self, spec: EnvSpec, config: RunConfig) -> dict[str, Any]:
        """All that decides what the episodes are. Limit, threshold and concurrency are not in it and may change."""
        asked = self.endpoint
        out: dict[str, Any] = {
            "env": spec.id,
            "env_version": spec.load().version,
            "split": self.split,
            "samples": self.samples,
            "seed": config.seed,
            "model": self.label or config.model,
            "served": config.engine if asked is None else asked.url,
            "weights": None if asked is not None else fingerprint(self.weights or Path(config.model)),
        }
        out |= {f"sampling.{name}": value for name, value in config.to_dict()["sampling"].items()}
        limits = ("max_turns", "max_tokens", "turn_timeout", "step_timeout", "score_timeout", "episode_timeout")
        return json.loads(json.dumps(out | {f"rollout.{name}": getattr(config.rollout, name) for name in limits}))


def fingerprint(folder: Path) -> str | None:
    """Names, sizes and times of a model folder's files in one word, so that other weights are noticed; None: no folder."""
    if not folder.is_dir():
        return None
    files = sorted(path for path in folder.iterdir() if path.is_file())
    told = "\n".join(f"{path.name} {(stat := path.stat()).st_size} {stat.st_mtime_ns}" for path in files)
    return f"{folder.resolve()} {hashlib.sha256(told.encode()).hexdigest()[:12]}"


def default_folder(identity: Mapping[str, Any]) -> Path:
    """`evals/ENV-MODEL-HASH`: the same for the same evaluation, another one for any other."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:6]
    named = (slug(identity["env"].rpartition("/")[2]), slug(Path(identity["model"]).name))
    return Path("evals") / "-".join((*named, digest))


def beside(folder: Path) -> Path:
    """The first of `FOLDER`, `FOLDER-2`, `FOLDER-3`, … that is not there."""
    number, free = 2, folder
    while free.exists():
        free, number = folder.with_name(f"{folder.name}-{number}"), number + 1
    return free


def slug(text: str) -> str:
    """A text as part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.") or "x"


def keep_plan(folder: Path, identity: Mapping[str, Any]) -> None:
    """Note in a folder what is played there, unless it says so already.

    Raises:
        ConfigError: the folder holds something else, or another evaluation; the message says what differs.
        OSError: the folder cannot be written.
    """
    path = folder / PLAN
    if not path.exists():
        if any(item.name != "run.lock" for item in folder.iterdir()):
            raise ConfigError(f"{folder} holds something that is not an evaluation; choose another folder with --out")
        write_whole(path, json.dumps(identity, indent=1))
        return
    try:
        before = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); choose another folder with --out") from error
    changed = [name for name in {**before, **identity} if before.get(name) != identity.get(name)]
    if changed:
        told = ", ".join(f"{name} was {before.get(name)!r} and is {identity.get(name)!r}" for name in changed)
        raise ConfigError(
            f"{folder} was begun with another configuration: {told}. Go on with the old one, or choose another folder (--out)"
        )

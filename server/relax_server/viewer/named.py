"""The model that a run's settings name, or that a service serves: where a folder holds no model of its own."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from relax_sdk.errors import ConfigError, RelaxError
from relax_sdk.evals.report import write_whole
from relax_sdk.media_config import MediaConfig
from relax_sdk.run import read_config
from relax_server.models.catalog import BUILDERS, resolve_model

TINY = "relax/tiny-"
"""Beginning of the names of built-in models that are made in a few seconds; making another one is not a page's work."""
SERVED = "served.json"
"""The file in a service's folder that names the folder of the model that it serves."""
KEPT = 256
"""Models whose folders are remembered."""


def named_model(folder: Path) -> Path | None:
    """The folder of the model in the settings of a run; nothing is downloaded for it.

    Args:
        folder: of the run.

    Returns:
        The folder, as `relax explain-mask` finds it; None: the settings cannot be read, or the model is not on this machine.
    """
    try:
        config = read_config(folder)
        if config.model in BUILDERS and not config.model.startswith(TINY):
            return None
        return _resolved(config.model, config.seed, config.media)
    except (RelaxError, OSError, ImportError, RuntimeError):
        return None  # tokens are shown by their ids


@lru_cache(maxsize=KEPT)
def _resolved(model: str, seed: int, media: MediaConfig | None) -> Path:
    """The folder of a model; what raises is asked again."""
    return resolve_model(model, seed, media)


def note_served(folder: Path, model: Path) -> None:
    """Note which model a service serves, for those who look at its folder later.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    try:
        write_whole(folder / SERVED, json.dumps({"model": str(model)}) + "\n")
    except OSError as error:
        raise ConfigError(f"folder {folder} cannot be written to ({error.strerror}); name another") from error


def served_model(folder: Path) -> Path | None:
    """The folder of the model that a service has served last; None: it is not noted, or not on this machine."""
    try:
        model = Path(json.loads((folder / SERVED).read_text())["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return model if model.is_dir() else None

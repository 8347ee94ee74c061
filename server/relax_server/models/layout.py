"""What a model folder says about itself, read without loading anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relax_sdk.errors import ConfigError


def hf_config(folder: Path) -> Any:
    """The configuration of a model folder, as transformers reads it.

    Raises:
        ConfigError: transformers cannot read it.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise unreadable(folder, error) from error


def unreadable(folder: Path, error: Exception) -> ConfigError:
    """The error of a model folder that transformers cannot read."""
    return ConfigError(f"{folder} is not a model folder transformers can read ({error})")


def model_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a model folder.

    Raises:
        ConfigError: there is none, or it is not JSON.
    """
    try:
        return json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is not a model folder ({error})") from error


def architecture(folder: Path) -> list[str]:
    """The architectures that a `config.json` names.

    Raises:
        ConfigError: no model folder.
    """
    return list(model_config(folder).get("architectures") or [])


def routed_shape(folder: Path) -> tuple[int, int] | None:
    """(layers, experts per token) of a mixture of experts; None of a dense model.

    Raises:
        ConfigError: no model folder.
    """
    config = model_config(folder)
    text = config.get("text_config") or config
    top_k = text.get("num_experts_per_tok")
    return (int(text["num_hidden_layers"]), int(top_k)) if top_k else None

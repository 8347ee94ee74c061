"""The table of architectures. A new one is a file beside these, and a line here; `tests/contract/test_families.py` runs over
all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from relax_sdk.errors import ConfigError
from relax_server.models.families.base import Family, MediaRule, Tower, Whole, check_supported
from relax_server.models.families.llama import LLAMA
from relax_server.models.families.mistral import MISTRAL
from relax_server.models.families.qwen2 import QWEN2
from relax_server.models.families.qwen2_5_omni import QWEN2_5_OMNI
from relax_server.models.families.qwen2_5_vl import QWEN2_5_VL
from relax_server.models.families.qwen3 import QWEN3
from relax_server.models.families.qwen3_moe import QWEN3_MOE
from relax_server.models.families.qwen3_omni import QWEN3_OMNI
from relax_server.models.families.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE
from relax_server.models.layout import model_config
from relax_server.models.weight_files import FolderWeights

__all__ = [
    "TABLE",
    "Family",
    "MediaRule",
    "Tower",
    "Whole",
    "check_supported",
    "family_of",
    "media_rule",
    "require_served",
    "trained_part",
]

_ALL = (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE, QWEN2_5_OMNI, QWEN3_OMNI)
TABLE: dict[str, Family] = {f.name: f for f in _ALL}
"""All architectures by name."""

_BY_TYPE = {f.model_type: f for f in TABLE.values()}
_WHOLE = {f.whole.model_type: f for f in TABLE.values() if f.whole is not None}


def family_of(model_type: str, source: str = "the model") -> Family:
    """The architecture of a `model_type`, of a trained part or of a folder that holds one.

    Raises:
        ConfigError: none of the table; the message lists them.
    """
    found = _BY_TYPE.get(model_type) or _WHOLE.get(model_type)
    if found is None:
        known = ", ".join([*_BY_TYPE, *_WHOLE])
        raise ConfigError(f"{source}: model_type {model_type!r} is not supported; supported are {known}")
    return found


def trained_part(config: Any) -> Any:
    """The configuration of what is trained: of the thinker, where a configuration is of a whole model."""
    family = _WHOLE.get(config.model_type)
    return config if family is None or family.whole is None else getattr(config, family.whole.config)


def media_rule(folder: Path) -> MediaRule | None:
    """How the model of a folder takes media; None: it does not.

    Raises:
        ConfigError: no model folder, or an architecture that is not in the table.
    """
    return family_of(str(model_config(folder).get("model_type")), str(folder)).media


def takes_media(folder: Path) -> bool:
    """Whether the model of a folder is one of the table that takes media; False of architectures that are not in it.

    Raises:
        ConfigError: no model folder.
    """
    kind = str(model_config(folder).get("model_type"))
    return kind in _BY_TYPE and _BY_TYPE[kind].media is not None


def _require_published(folder: Path, family: Family, engine: str) -> None:
    """Refuse experts that are stacked as transformers writes them and other engines do not read them.

    Raises:
        ConfigError: how they are stacked.
    """
    if not family.transposes_experts:
        return
    text = model_config(folder)["text_config"]
    wanted = [text["hidden_size"], 2 * text["moe_intermediate_size"]]
    for name, shape in FolderWeights(folder).shapes.items():
        if name.endswith(".experts.gate_up_proj") and shape[1:] != wanted:
            raise ConfigError(
                f"{folder}: {name} has shape {shape}, as transformers stacks experts when it saves a model; "
                f"engine={engine!r} reads {[shape[0], *wanted]}, as published folders have it. Use such a folder, or "
                "engine='embedded'"
            )


def require_served(folder: Path, engine: Literal["sglang", "vllm"]) -> None:
    """Refuse a model that an engine of somebody else cannot serve to this trainer; architectures that are not in the table are
    left to the engine, as they are not trained.

    Raises:
        ConfigError: the architecture, and the engines that serve it.
    """
    kind = str(model_config(folder).get("model_type"))
    family = _BY_TYPE.get(kind) or _WHOLE.get(kind)
    if family is None:
        return
    if kind in _WHOLE:
        raise ConfigError(
            f"{folder}: engine={engine!r} does not serve the folder of a whole {kind} model here; use engine='embedded', or a "
            "folder with the thinker alone"
        )
    if getattr(family, engine) is None:
        other = [name for name in ("sglang", "vllm") if getattr(family, name) is not None]
        instead = " or ".join(f"engine={name!r}" for name in ["embedded", *other])
        raise ConfigError(f"{folder}: engine={engine!r} does not serve {family.name} to this trainer; use {instead}")
    _require_published(folder, family, engine)

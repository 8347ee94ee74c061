"""The memory that training a model takes, before anything is started: what `relax plan` shows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from relax_sdk.config import TrainingConfig
from relax_sdk.errors import ConfigError
from relax_sdk.field_checks import check_types, require
from relax_sdk.layout import LayoutConfig
from relax_sdk.runtime import find_runtime
from relax_sdk.tuning import LoraConfig, TowersConfig, Tuning

_DEVICES = re.compile(r"(\d+)x(\d+(?:\.\d+)?)GB", re.IGNORECASE)


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned.

    Raises:
        ConfigError: a field of another type, or a number of tokens below 0.
    """

    model: str
    """A built-in name or a Hugging Face folder; only its configuration is read."""
    devices: int
    device_bytes: int
    """Memory of one device."""
    layout: LayoutConfig | None = None
    """None: all that fit, best first."""
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(dtype="bfloat16"))
    reference: bool = False
    """The policy keeps a frozen copy of what it trains: `algorithm.kl_coef` above 0 and `bus="local"`."""
    tuning: Tuning = field(default_factory=Tuning)
    """What is trained: everything, adapters, towers or not."""
    visual_tokens: int = 0
    """Tokens of different images and films in a forest."""
    audio_tokens: int = 0
    """Tokens of different sounds in a forest, those of films included; a sound that is longer than `MemoryPlan.chunk_tokens`
    counts in whole chunks of so many."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("visual_tokens", "audio_tokens"):
            require(getattr(self, name) >= 0, self, name, "0 or more")


@dataclass(frozen=True)
class PlannedRank:
    """Bytes of one trainer process by kind; ranks of one pipeline stage are alike."""

    stage: int
    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    """What the decoder keeps for the backward pass, of all forests of `training.token_budget` tokens that the stage holds at
    once."""
    towers: int
    """What media towers keep for the backward pass, of the media of these forests."""
    logits: int
    attention_plan: int
    offloaded: bool = False
    """The optimizer's state is on the device for the update alone, when nothing is kept for a backward pass."""

    @property
    def total(self) -> int:
        """Most bytes at once."""
        kept = self.weights + self.gradients + self.reference
        computed = self.activations + self.towers + self.logits + self.attention_plan
        return kept + (max(self.optimizer, computed) if self.offloaded else self.optimizer + computed)


@dataclass(frozen=True)
class PlannedLayout:
    """One layout and its ranks."""

    layout: LayoutConfig
    ranks: tuple[PlannedRank, ...]
    fits: bool


@dataclass(frozen=True)
class MemoryPlan:
    """The layouts that fit, best first, or the one that was asked for."""

    parameters: int
    kv_bytes_per_token: int
    """Keys and values of one token in an engine."""
    engine_weights: int
    """Bytes of the weights in an engine of one device."""
    kv_tokens: int
    """Tokens whose keys and values an engine has room for beside them, on a device of its own; 0: the weights do not fit."""
    layouts: tuple[PlannedLayout, ...]
    tower_bytes_per_token: dict[str, float]
    """Bytes that each media tower keeps for the backward pass for each token, by name; 0: it is frozen."""
    chunk_tokens: int
    """Tokens of a full chunk of the audio tower, which pads the last chunk of a longer sound; 0: the model hears nothing."""


class _Planner(Protocol):
    def plan_memory(self, request: PlanRequest) -> MemoryPlan: ...


def parse_devices(text: str) -> tuple[int, int]:
    """Read `8x80GB` as (8, bytes of one).

    Raises:
        ConfigError: another form.
    """
    match = _DEVICES.fullmatch(text.strip())
    if match is None or int(match[1]) < 1:
        raise ConfigError(f"--devices {text!r}: write number and memory, such as 8x80GB")
    return int(match[1]), int(float(match[2]) * 1e9)


def parse_layout(text: str) -> LayoutConfig:
    """Read `tp=2,dp=4`.

    Raises:
        ConfigError: an unknown name, or a value outside its range.
    """
    from relax_sdk.cli_settings import parse_settings

    values = parse_settings([f"layout.{part.strip()}" for part in text.split(",") if part.strip()]).get("layout", {})
    unknown = sorted(set(values) - set(LayoutConfig.__dataclass_fields__))
    if unknown:
        raise ConfigError(
            f"--layout {text!r}: no field {unknown[0]!r}; there are {', '.join(LayoutConfig.__dataclass_fields__)}"
        )
    return LayoutConfig(**values)


def parse_tuning(settings: Sequence[str]) -> Tuning:
    """Read `lora.rank=16`, `towers.visual=freeze` and the like.

    Raises:
        ConfigError: another setting, or a value outside its range.
    """
    from relax_sdk.cli_settings import parse_settings

    values: dict[str, Any] = parse_settings(list(settings))
    kinds: dict[str, Any] = {"lora": LoraConfig, "towers": TowersConfig}
    for name, given in values.items():
        if name not in kinds or not isinstance(given, dict):
            raise ConfigError(f"--set {name}: only settings of lora and towers change what is planned, such as lora.rank=16")
        unknown = sorted(set(given) - set(kinds[name].__dataclass_fields__))
        if unknown:
            raise ConfigError(f"--set {name}.{unknown[0]}: there are {', '.join(kinds[name].__dataclass_fields__)}")
        values[name] = kinds[name](**{key: tuple(v) if isinstance(v, list) else v for key, v in given.items()})
    return Tuning(**values)


def plan_memory(request: PlanRequest) -> MemoryPlan:
    """Say what every rank would hold.

    Raises:
        ConfigError: a model that cannot be trained; a layout that the model or the devices do not allow; or media that the
            model does not take, or images and films with more tokens than a forest.
    """
    if not Path(request.model).expanduser().is_dir() and "/" not in request.model:
        raise ConfigError(f"--model {request.model!r}: neither a folder nor a built-in name such as relax/tiny-omni")
    if request.layout is not None and request.layout.ranks > request.devices:
        raise ConfigError(
            f"the layout {request.layout} has {request.layout.ranks} ranks, and there are {request.devices} devices"
        )
    return cast(_Planner, find_runtime("local")).plan_memory(request)

"""Configuration of what is trained: the whole model, its towers apart from the rest, or low-rank adapters (LoRA)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from relax_sdk.errors import ConfigError
from relax_sdk.field_checks import check_types, require

TOWERS = ("visual", "audio_tower")
"""The encoders in front of an omni model's decoder, by the names that its weights have."""
TARGETS = ("attention", "mlp", "experts", *TOWERS)
"""Parts of a model that adapters can be put on."""

TowerMode = Literal["auto", "train", "freeze"]


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA, arXiv 2106.09685): each matrix W that is a target computes W x + alpha / rank · B A x.

    A is [rank, inputs] and drawn at random, B is [outputs, rank] and zero at first, and only they are trained; W stays as the
    model's folder has it. Each of the projections q, k, v, o, gate, up and down has a pair of its own, as in PEFT.
    """

    rank: int = 0
    """0: no adapters, the model itself is trained."""
    alpha: float = 32.0
    """Adapters are scaled by alpha / rank, so that another rank wants no other learning rate."""
    targets: tuple[str, ...] = ("attention", "mlp", "experts")
    """Which matrices get one. `mlp`: the feed-forward of dense layers; `experts`: that of each expert in layers that are
    mixtures; `visual` and `audio_tower`: every linear layer of the tower. Of the first three, those that the model has."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.rank >= 0, self, "rank", "0 (no adapters) or more")
        require(self.alpha > 0, self, "alpha", "above 0")
        known = 0 < len(self.targets) == len({*self.targets} & {*TARGETS})
        require(known, self, "targets", f"one or more of {', '.join(TARGETS)}")

    @property
    def scale(self) -> float:
        """What B A is multiplied by; there must be adapters."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class TowersConfig:
    """Whether the towers of an omni model are trained, and how fast; a text model has none."""

    visual: TowerMode = "auto"
    """`train`: all of the tower is trained. `freeze`: it stays as it is. `auto`: it is trained as the decoder is, and frozen
    where the decoder has adapters instead."""
    audio_tower: TowerMode = "auto"
    visual_lr: float | None = None
    """A learning rate of its own, in place of `optimizer.lr`; it rises and decays alike. It counts for adapters in the tower
    too."""
    audio_tower_lr: float | None = None
    visual_lr_factor: float | None = None
    """The same as a multiple of `optimizer.lr`."""
    audio_tower_lr_factor: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        for tower in TOWERS:
            for name in (f"{tower}_lr", f"{tower}_lr_factor"):
                value = getattr(self, name)
                require(value is None or value > 0, self, name, "above 0")
                frozen = value is not None and getattr(self, tower) == "freeze"
                require(not frozen, self, name, f"none, as towers.{tower} = 'freeze'")
            both = getattr(self, f"{tower}_lr") is not None and getattr(self, f"{tower}_lr_factor") is not None
            require(not both, self, f"{tower}_lr_factor", f"none, as {tower}_lr = {getattr(self, f'{tower}_lr')} is given")

    @property
    def with_own_rate(self) -> tuple[str, ...]:
        """Towers that have a learning rate of their own."""
        rates = {tower: (getattr(self, f"{tower}_lr"), getattr(self, f"{tower}_lr_factor")) for tower in TOWERS}
        return tuple(tower for tower, given in rates.items() if given != (None, None))

    def lr_factor(self, tower: str, lr: float) -> float:
        """What the rate of a tower is a multiple of `optimizer.lr` by."""
        own = getattr(self, f"{tower}_lr")
        return own / lr if own is not None else getattr(self, f"{tower}_lr_factor") or 1.0


@dataclass(frozen=True)
class Tuning:
    """What is trained of a model.

    Raises:
        ConfigError: a tower is to have adapters, and to be trained whole or frozen.
    """

    lora: LoraConfig = field(default_factory=LoraConfig)
    towers: TowersConfig = field(default_factory=TowersConfig)

    def __post_init__(self) -> None:
        for tower in TOWERS:
            mode = getattr(self.towers, tower)
            if self.adapts(tower) and mode != "auto":
                raise ConfigError(
                    f"towers.{tower} = {mode!r} with {tower!r} in lora.targets; allowed: 'auto' (its adapters are trained), or "
                    f"{tower!r} not in lora.targets"
                )

    def _towers(self) -> dict[str, str]:
        """What is done with towers where it is not what is done with the decoder."""
        usual = not self.has_lora
        modes = {tower: self.trains_whole(tower) for tower in TOWERS}
        return {tower: "train" if whole else "freeze" for tower, whole in modes.items() if whole != usual}

    @property
    def keeps_weights(self) -> bool:
        """Whether some weights of the model's folder stay as they are."""
        return self.has_lora or not all(self.trains_whole(tower) for tower in TOWERS)

    @property
    def has_lora(self) -> bool:
        """Whether adapters are trained in place of the decoder."""
        return self.lora.rank > 0

    def adapts(self, part: str) -> bool:
        """Whether a part of `TARGETS` has adapters."""
        return self.has_lora and part in self.lora.targets

    def trains_whole(self, tower: str) -> bool:
        """Whether all weights of a tower are trained."""
        mode: TowerMode = getattr(self.towers, tower)
        return mode == "train" or (mode == "auto" and not self.has_lora)

    def identity(self) -> dict[str, Any]:
        """Plain data that a checkpoint must share to be continued; None where everything is trained alike.

        Rates of towers may change, but not which of them have one.
        """
        return {
            "lora": dataclasses.asdict(self.lora) if self.has_lora else None,
            "towers": self._towers() or None,
            "towers_with_own_rate": [*self.towers.with_own_rate] or None,
        }

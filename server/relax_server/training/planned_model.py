"""A model as `relax plan` sees it: shapes of its tensors, and which of them a rank has, without any of their numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_sdk.layout import LayoutConfig
from relax_sdk.tuning import TOWERS, Tuning
from relax_server.models.families import Family, family_of, trained_part

BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Layers of a decoder layer whose outputs tensor parallelism divides."""
BY_INPUTS = ("o_proj", "down_proj")
"""Those whose inputs it divides."""
DIVIDED = (*(f"{name}." for name in BY_OUTPUTS), *(f"{name}.weight" for name in BY_INPUTS))
"""Parts of a decoder layer that tensor parallelism divides."""


@dataclass(frozen=True)
class Tensors:
    """Numbers of a rank's parameters, by what divides their gradients and optimizer state."""

    dense: int
    expert: int

    def __add__(self, other: Tensors) -> Tensors:
        return Tensors(self.dense + other.dense, self.expert + other.expert)

    def __sub__(self, other: Tensors) -> Tensors:
        return Tensors(self.dense - other.dense, self.expert - other.expert)

    @property
    def all(self) -> int:
        return self.dense + self.expert


NOTHING = Tensors(0, 0)


@dataclass(frozen=True)
class Model:
    """What a plan needs to know of a model."""

    whole: Any
    """The configuration of all that is trained, towers included."""
    config: Any
    """The language model's part of the configuration."""
    family: Family
    shapes: dict[str, tuple[int, ...]] = field(repr=False)
    """Shapes of all parameters, by transformers' names."""
    linear: frozenset[str] = field(repr=False)
    """Names of the weights that are those of linear layers."""
    tied: bool

    @classmethod
    def of(cls, hf_config: Any) -> Model:
        """Build the model on the meta device, which takes no memory.

        Raises:
            ConfigError: an architecture that is not in the table.
        """
        import torch

        hf_config = trained_part(hf_config)
        family = family_of(hf_config.model_type)
        built = family.model_class()
        make = built._from_config if hasattr(built, "_from_config") else built.from_config
        with torch.device("meta"):
            model = make(hf_config)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        linear = frozenset(f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear))
        return cls(hf_config, family.text(hf_config), family, shapes, linear, bool(hf_config.tie_word_embeddings))

    def layer(self, number: int, layout: LayoutConfig) -> Tensors:
        """One decoder layer's part of a rank."""
        return sum((self._part(n, s, layout) for n, s in self._layer(number)), NOTHING)

    def ends(self, first: bool, last: bool, layout: LayoutConfig) -> Tensors:
        """What the first and the last pipeline stage hold beside their layers: embedding, towers; norm, output layer."""
        dense = 0
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            if _tower(name) is not None:
                dense += size if first else 0
            elif name.endswith("embed_tokens.weight"):
                dense += size // layout.tp * (int(first) + int(last and self.tied and not first))
            elif name.startswith("lm_head."):
                dense += size // layout.tp if last else 0
            elif ".layers." not in name:
                dense += size if last else 0
        return Tensors(dense, 0)

    def towers(self, chosen: Callable[[str], bool]) -> Tensors:
        """The weights of the towers that are chosen by name; every rank of the first stage has them whole."""
        named = ((_tower(name), shape) for name, shape in self.shapes.items())
        return Tensors(sum(math.prod(shape) for tower, shape in named if tower is not None and chosen(tower)), 0)

    def adapters(self, layers: Sequence[int], first: bool, layout: LayoutConfig, tuning: Tuning) -> Tensors:
        """The adapters of a rank.

        Args:
            layers: decoder layers of its pipeline stage.
            first: whether that is the first one, which has the towers.
            layout: how ranks share the model.
            tuning: which layers have adapters.
        """
        own = [entry for number in layers for entry in self._layer(number)]
        found = sum((self._adapter(name, shape, layout, tuning) for name, shape in own), NOTHING)
        rank = tuning.lora.rank
        for name, shape in self.shapes.items():
            tower = _tower(name)
            if first and tower is not None and tuning.adapts(tower) and name in self.linear:
                found += Tensors(rank * sum(shape), 0)
        return found

    def _layer(self, number: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        prefix = re.compile(rf"(.*\.)?layers\.{number}\.")
        return ((n, s) for n, s in self.shapes.items() if _tower(n) is None and prefix.match(n))

    def _part(self, name: str, shape: tuple[int, ...], layout: LayoutConfig) -> Tensors:
        size = math.prod(shape)
        if ".experts." in name:
            return Tensors(0, size // (layout.ep * layout.etp))
        return Tensors(size // layout.tp if any(part in name for part in DIVIDED) else size, 0)

    def _adapter(self, name: str, shape: tuple[int, ...], layout: LayoutConfig, tuning: Tuning) -> Tensors:
        rank = tuning.lora.rank
        if ".experts." in name:  # of one matrix in all experts: [experts, outputs, inputs]
            if not tuning.adapts("experts"):
                return NOTHING
            experts, outputs, inputs = shape
            if "gate_up_proj" in name:  # two pairs, whose outputs are divided
                numbers = rank * (2 * inputs + outputs // layout.etp)
            else:
                numbers = rank * (inputs // layout.etp + outputs)
            return Tensors(0, experts // layout.ep * numbers)
        part = "attention" if ".self_attn." in name else "mlp"
        layer = name.removesuffix(".weight").rpartition(".")[2]
        if not name.endswith(".weight") or not tuning.adapts(part) or layer not in (*BY_OUTPUTS, *BY_INPUTS):
            return NOTHING
        outputs, inputs = shape
        if layer in BY_OUTPUTS:
            return Tensors(rank * (inputs + outputs // layout.tp), 0)
        return Tensors(rank * (inputs // layout.tp + outputs), 0)


def _tower(name: str) -> str | None:
    """The tower that a parameter belongs to."""
    return next((tower for tower in TOWERS if f"{tower}." in name), None)

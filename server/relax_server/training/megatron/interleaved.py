"""All that one rank has of a model: one part, or several where the pipeline is interleaved."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from relax_server.training.forest import Forest
from relax_server.training.megatron.forest_model import ForestModel
from relax_server.training.megatron.micro_batch import MicroBatch


class InterleavedModel(torch.nn.ModuleList):
    """The parts of one rank of an interleaved pipeline (arXiv 2104.04473, section 2.2); Megatron calls them model chunks.

    A forest passes the first part of every rank, then the second one of every rank, and so on.

    Args:
        parts: of this rank, at least two, in that order.
    """

    def __init__(self, parts: Sequence[ForestModel]) -> None:
        super().__init__(parts)
        self.parts = tuple(parts)
        first, last = parts[0].place, parts[-1].place
        self.config: Any = parts[0].config
        self.family, self.moe_layers, self.device = parts[0].family, parts[0].moe_layers, parts[0].device
        self.place = dataclasses.replace(first, layers=[i for part in parts for i in part.place.layers], last=last.last)
        """All that the rank holds."""

    def named_parts(self) -> list[tuple[str, ForestModel]]:
        """As `ForestModel.named_parts`."""
        return [(f"{number}.", part) for number, part in enumerate(self.parts)]

    def micro_batch(self, forest: Forest) -> MicroBatch:
        """As `ForestModel.micro_batch`; every part takes the same."""
        return self.parts[0].micro_batch(forest)


RankModel = ForestModel | InterleavedModel
"""All that a rank has."""

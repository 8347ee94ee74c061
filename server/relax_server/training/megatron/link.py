"""How Megatron parameters and Hugging Face tensors hold the same numbers, and what a rank has of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relax_sdk.errors import ConfigError
from relax_server.models.weight_files import FolderWeights
from relax_server.training.megatron.place import Group, Place

Tensors = list[Tensor]


Slices = tuple[slice, ...]
"""A slice with start and stop for each of a tensor's first dimensions; the others are whole."""


@dataclass(frozen=True)
class Cut:
    """How the ranks of a group divide each Hugging Face tensor of a link along one of its dimensions."""

    dim: int
    group: Group = Group.TENSOR
    blocks: int = 1
    """Parts of the tensor along `dim` that are divided each by itself: gate and up projections in one tensor are two."""

    def ranges(self, shape: Sequence[int], place: Place) -> list[slice]:
        """Where a rank's part of a tensor is along `dim`, a slice for each block.

        Raises:
            ConfigError: the tensor cannot be divided evenly.
        """
        rank, size = place.part(self.group)
        block = shape[self.dim] // self.blocks
        if shape[self.dim] % (self.blocks * size):
            raise ConfigError(f"{shape[self.dim]} of shape {list(shape)} cannot be divided by {size} {self.group.value} ranks")
        first, part = rank * (block // size), block // size
        return [slice(b * block + first, b * block + first + part) for b in range(self.blocks)]


ROWS, COLUMNS = Cut(0), Cut(1)


@dataclass(frozen=True)
class Link:
    """Megatron parameters and the Hugging Face tensors that hold the same numbers."""

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    join: Callable[[Tensors], Tensors]
    """Hugging Face tensors to Megatron's."""
    split: Callable[[Tensors], Tensors]
    """Megatron's to Hugging Face tensors."""
    cuts: tuple[Cut, ...] = ()
    """What is not cut is whole on every rank that has it. At most one cut has several blocks."""
    expert: bool = False
    """Whether they belong to experts, whose copies are on other ranks than those of other parameters."""
    is_copy: bool = False
    """Whether another stage writes them: the embedding that is the last stage's output layer as well."""

    def read(self, weights: FolderWeights, place: Place) -> Tensors:
        """Megatron parameters of a rank from a folder; only what is asked for is read.

        Raises:
            ConfigError: a tensor is missing, or cannot be divided evenly.
        """
        return self.join([self._read(weights, name, place) for name in self.hf])

    def _read(self, weights: FolderWeights, name: str, place: Place) -> Tensor:
        if name not in weights.shapes:
            return weights.read(name)
        dim, places = self.slices(weights.shapes[name], place)
        pieces = [weights.read(name, at) for at in places]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def slices(self, shape: Sequence[int], place: Place) -> tuple[int, list[Slices]]:
        """Where a rank's part of a Hugging Face tensor of this shape is.

        Returns:
            The dimension along which the pieces of the part lie one after the other, and their slices; one with no slice is
            the whole.

        Raises:
            ConfigError: the tensor cannot be divided evenly.
        """
        cuts = [cut for cut in self.cuts if place.part(cut.group)[1] > 1]
        if not cuts:
            return 0, [()]
        along = max(cuts, key=lambda cut: cut.blocks)
        whole = [slice(0, n) for n in shape[: max(cut.dim for cut in cuts) + 1]]
        for cut in cuts:
            if cut is not along:
                (whole[cut.dim],) = cut.ranges(shape, place)
        pieces = [(*whole[: along.dim], own, *whole[along.dim + 1 :]) for own in along.ranges(shape, place)]
        return along.dim, pieces

    def whole(self, parameters: Mapping[str, Tensor], place: Place) -> dict[str, Tensor]:
        """Each whole Hugging Face tensor on the meta device, from the parameters of one rank."""
        out = {}
        for name, tensor in zip(self.hf, self.split([parameters[n].to("meta") for n in self.megatron]), strict=True):
            shape = list(tensor.shape)
            for cut in self.cuts:
                shape[cut.dim] *= place.part(cut.group)[1]
            out[name] = tensor.new_empty(shape)
        return out

    def is_written_by(self, place: Place) -> bool:
        """Whether this rank is the one that writes its part: others may hold the same."""
        group = Group.EXPERT_TENSOR if self.expert else Group.TENSOR
        divided = any(cut.group is group for cut in self.cuts)
        writes = place.writes_experts if self.expert else place.writes
        return writes and not self.is_copy and (divided or place.part(group)[0] == 0)

    def pieces(self, parameters: Mapping[str, Tensor], place: Place) -> Iterator[tuple[str, Slices, Tensor]]:
        """What a rank has of each Hugging Face tensor, and where it belongs: the inverse of `read`."""
        for name, tensor in zip(self.hf, self.split([parameters[n] for n in self.megatron]), strict=True):
            shape = list(tensor.shape)
            for cut in self.cuts:
                shape[cut.dim] *= place.part(cut.group)[1]
            dim, places = self.slices(shape, place)
            yield from ((name, at, piece) for at, piece in zip(places, tensor.chunk(len(places), dim), strict=True))

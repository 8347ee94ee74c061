"""A model's parameters under Hugging Face names: compared with a folder, and given out piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from relax_sdk.errors import ConfigError
from relax_server.models.weight_files import FolderWeights
from relax_server.training.megatron.hf import untrained
from relax_server.training.megatron.link import Link, Slices
from relax_server.training.megatron.place import Place

FLOATS = ("F64", "F32", "F16", "BF16")


def check_weights(whole: Mapping[str, Tensor], weights: FolderWeights) -> None:
    """Compare names, shapes and dtypes of a folder with a model, before anything is read.

    Args:
        whole: all tensors of the model, of all ranks, by the names of the folder; they may be on the meta device.
        weights: of the folder.

    Raises:
        ConfigError: weights are missing, some belong nowhere, or one has another shape or dtype; the file and tensor are named.
    """
    shapes = {name: list(tensor.shape) for name, tensor in whole.items()}
    tied = {name for name in weights.shapes if name.endswith("lm_head.weight")}
    others = tied | untrained(weights.shapes)
    missing, unexpected = sorted(shapes.keys() - weights.shapes.keys()), sorted(weights.shapes.keys() - shapes.keys() - others)
    if missing or unexpected:
        raise ConfigError(
            f"{weights.folder}: {len(missing)} weights are missing {missing[:4]} and {len(unexpected)} belong nowhere "
            f"{unexpected[:4]}; config.json must be that of these weights"
        )
    for name, shape in shapes.items():
        if weights.shapes[name] != shape:
            raise ConfigError(
                f"{weights.where(name)} has shape {weights.shapes[name]}, and config.json wants {shape}; "
                "one of them is of another model"
            )
        if weights.dtypes[name] not in FLOATS:
            raise ConfigError(
                f"{weights.where(name)} has dtype {weights.dtypes[name]}; allowed: {', '.join(FLOATS)}. Quantised weights "
                "cannot be trained: name the folder that they were made from"
            )


class HfWeights(Mapping[str, Tensor]):
    """Parameters under Hugging Face names, of which each rank has its part; a tensor is a view of its parameter where possible.

    As a mapping it has the tensors of an undivided model. Those that are no view are made when they are asked for, and those of
    one link are kept at a time.

    Args:
        links: of this rank's part.
        parameters: of this rank, by Megatron's names.
        place: the part.
        whole: all tensors of the model, of all ranks, on the meta device.
    """

    def __init__(
        self, links: Sequence[Link], parameters: Mapping[str, Tensor], place: Place, whole: Mapping[str, Tensor]
    ) -> None:
        self.whole = whole
        self.leads = place.first and place.writes and place.tensor[0] == 0
        """Whether this is the one rank that has the whole model's beginning to write."""
        self._links, self._place, self._parameters = links, place, parameters
        self._link_of = {name: link for link in links for name in link.hf}
        self._kept: tuple[Link, dict[str, Tensor]] | None = None

    def pieces(self) -> Iterator[tuple[str, Slices, Tensor]]:
        """What this rank is to write: a tensor's name, where in it, and the numbers; those of one link are made at a time."""
        for link in self._links:
            if link.is_written_by(self._place):
                yield from link.pieces(self._parameters, self._place)

    def __getitem__(self, name: str) -> Tensor:
        link = self._link_of[name]
        if self._kept is None or self._kept[0] is not link:
            self._kept = None  # before others take its place
            self._kept = link, {}
            for own, at, piece in link.pieces(self._parameters, self._place):
                assert not at, f"{own} is divided over several ranks"
                self._kept[1][own] = piece
        return self._kept[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._link_of)

    def __len__(self) -> int:
        return len(self._link_of)


class WithUntrained:
    """Trained weights, and those of a folder's other parts as they are there; what an export writes.

    Args:
        trained: under Hugging Face names.
        weights: of the folder that the model was loaded from.
    """

    def __init__(self, trained: HfWeights, weights: FolderWeights) -> None:
        self._trained, self._weights = trained, weights
        self._others = sorted(untrained(weights.shapes))
        self.whole = {**trained.whole, **{name: weights.read(name).to("meta") for name in self._others}}
        """All tensors on the meta device: shapes and dtypes alone."""

    def pieces(self) -> Iterator[tuple[str, Slices, Tensor]]:
        """What this rank is to write, as `HfWeights.pieces`; one rank writes the other parts."""
        yield from self._trained.pieces()
        if self._trained.leads:
            yield from ((name, (), self._weights.read(name)) for name in self._others)

"""What a weight update brings: a whole model, or adapters merged into the weights that the engine was started with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from relax_sdk.errors import ConfigError
from relax_server.models.adapter_files import Adapters, fingerprint, merged, read_adapters
from relax_server.models.weight_files import FolderWeights, read_weights


@dataclass(frozen=True)
class WeightUpdate:
    """Tensors for an update, by the names in their folder."""

    tensors: dict[str, torch.Tensor]
    whole: bool = True
    """All of the model's; otherwise those that are not here are right already."""
    differs: frozenset[str] | None = None
    """Which tensors are other ones than those of the base afterwards; None: any."""


class WeightReader:
    """Reads updates while the engine generates; used by one caller at a time.

    Adapters are merged into the base weights as its folder has them, never into what an earlier update left, so nothing drifts.
    The files are mapped, so the base takes no memory besides the system's cache of them.

    Args:
        base: the folder that the engine was started with.
        dtype: of the engine's weights.
    """

    def __init__(self, base: Path, dtype: torch.dtype) -> None:
        self._folder, self._dtype = base, dtype
        self._differs: frozenset[str] | None = frozenset()

    @cached_property
    def _base(self) -> FolderWeights:
        return FolderWeights(self._folder, mapped=None)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self._folder)

    def read(self, folder: Path, undefined: bool) -> WeightUpdate:
        """Read what the trainer has put into a folder.

        Args:
            folder: a model folder, or one with `adapters.safetensors`.
            undefined: the engine's weights are not defined now, so all are wanted.

        Raises:
            ConfigError: neither is there, it is damaged, or the adapters belong to other base weights.
        """
        adapters = read_adapters(folder)
        if adapters is None:
            return WeightUpdate(read_weights(folder))
        if adapters.base != self._fingerprint:
            raise ConfigError(
                f"{folder}: the adapters belong to other weights than those in {self._folder}, which this engine was started "
                "with; start it with the model that is trained"
            )
        return self._merged(adapters, None if undefined else self._differs)

    def _merged(self, adapters: Adapters, differs: frozenset[str] | None) -> WeightUpdate:
        more = self._base.shapes if differs is None else differs
        tensors = merged(self._base, adapters, self._dtype, more)
        return WeightUpdate(tensors, whole=differs is None, differs=frozenset(adapters.changes(self._base.shapes)))

    def taken(self, update: WeightUpdate) -> None:
        """The engine has these weights now."""
        self._differs = update.differs

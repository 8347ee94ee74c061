"""Names and shapes of a model's weights, compared before others take their place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relax_sdk.errors import ConfigError, EngineError
from relax_server.models import weight_files
from relax_server.models.layout import model_config


@dataclass(frozen=True)
class WeightShapes:
    """What weights must be like to fit a model; servers that do not find a place for one often only log it."""

    shapes: dict[str, list[int]]
    tied: bool = False
    """Its head is its embedding."""

    @classmethod
    def of(cls, folder: Path) -> WeightShapes:
        """Shapes of the weights in a model folder.

        Raises:
            EngineError: no weights there, or a file is damaged.
            ConfigError: no model folder.
        """
        return cls(read_shapes(folder), bool(model_config(folder).get("tie_word_embeddings")))

    @classmethod
    def of_served(cls, folder: Path, new: dict[str, list[int]]) -> WeightShapes:
        """Shapes of a model that a server has from a folder; if that is not on this machine, the new ones are believed."""
        return cls.of(folder) if folder.is_dir() else cls(new)

    def check(self, new: dict[str, list[int]], what: str) -> None:
        """Compare others with them.

        Args:
            new: name and shape of each.
            what: for the message.

        Raises:
            EngineError: they do not fit.
        """
        old = self.shapes
        if self.tied:  # some folders hold the head all the same
            old, new = ({n: shape for n, shape in w.items() if not n.endswith("lm_head.weight")} for w in (old, new))
        if new == old:
            return
        missing, unknown = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
        if missing or unknown:
            raise EngineError(
                f"{what}: the weights do not fit the model: {len(missing)} missing {missing[:4]}, "
                f"{len(unknown)} unknown names {unknown[:4]}"
            )
        name = next(name for name in old if old[name] != new[name])
        raise EngineError(f"{what}: weight {name} has shape {new[name]}, but the model has {old[name]}")


def read_shapes(folder: Path) -> dict[str, list[int]]:
    """Name and shape of every weight in a folder.

    Raises:
        EngineError: no weights there, or a file is damaged.
    """
    try:
        return weight_files.read_shapes(folder)
    except ConfigError as error:
        raise EngineError(str(error)) from error

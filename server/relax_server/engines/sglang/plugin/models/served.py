"""What every model of the plugin has: media tokens that are never sampled, and weights that are all taken or refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

PLACEHOLDERS = ("image_token_id", "audio_token_id", "video_token_id")
BRACKETS = ("vision_start_token_id", "vision_end_token_id", "audio_start_token_id", "audio_end_token_id")


class Served:
    """Put before one of SGLang's own models."""

    prefix_of_whole = ""
    """What the names of weights begin with in the folder of a larger model."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)  # type: ignore[call-arg] - of the model it is put before
        banned = {id for name in (*PLACEHOLDERS, *BRACKETS) if (id := getattr(config, name, None)) is not None}
        model: Any = self
        model.register_buffer("banned", torch.tensor(sorted(banned)), persistent=False)

    def take_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Load tensors as SGLang does."""
        return super().load_weights(weights)  # type: ignore[misc] - as above

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors by the names that transformers writes.

        Raises:
            ValueError: a tensor has no place; SGLang would only log it.
        """
        known: set[str] = getattr(self, "_known", set())
        seen: set[str] = set()

        def watched() -> Iterable[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                name = name.removeprefix(self.prefix_of_whole)
                if known and name not in known:
                    raise ValueError(f"weight {name}: the model has no such weight")
                seen.add(name)
                yield name, tensor

        self.take_weights(watched())
        if known - seen:
            raise ValueError(f"{len(known - seen)} weights are missing, such as {sorted(known - seen)[:4]}")
        self._known = seen

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As SGLang's, without the logits of media tokens."""
        out = super().forward(*args, **kwargs)  # type: ignore[misc] - as above
        logits = getattr(out, "next_token_logits", None)
        if logits is not None:
            model: Any = self
            logits[:, model.banned] = -torch.inf
        return out

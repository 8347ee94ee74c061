"""One packed forest as tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from relax_server.training.forest import Forest


@dataclass(frozen=True)
class Sounds:
    """Sounds that one call of the audio tower takes."""

    frames: torch.Tensor
    """float32 [n_mels, all frames]."""
    lengths: torch.Tensor
    """int64 [n], frames of each."""


@dataclass(frozen=True)
class ForestInputs:
    """What a model's `forward` takes."""

    ids: torch.Tensor
    """int64 [t]."""
    positions: torch.Tensor
    """float32 [3, t]."""
    end: torch.Tensor
    """int64 [t], the mask: query q sees key k iff k <= q < end[k]."""
    rows: torch.Tensor
    """int64 [r], tokens whose logits are wanted."""
    media_tokens: torch.Tensor
    """int64 [p], tokens that are placeholders."""
    media_rows: torch.Tensor
    """int64 [p], their rows in the embeddings: visual items, then each element of `sounds`."""
    n_visual: int
    """Of the p placeholders, the first that are images and videos."""
    patches: torch.Tensor | None = None
    """float32 [all patches, channels]."""
    grid: torch.Tensor | None = None
    """int64 [n visual items, 3]."""
    sounds: list[Sounds] = field(default_factory=list)
    routes: list[torch.Tensor] | None = None
    """Per mixture-of-experts layer int64 [t, top_k], -1 where the trainer chooses."""

    @classmethod
    def of(cls, forest: Forest, chunk: int, device: torch.device) -> ForestInputs:
        """Tensors of a forest.

        Args:
            forest: packed samples.
            chunk: frames of one full chunk of the audio tower. It pads chunks to the longest one of a call, which changes
                what a shorter one sees; so sounds shorter than a chunk are only put together with others of their length,
                and every sound is computed as if it were alone.
            device: where to put them.
        """

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        visual = [i for i, m in enumerate(forest.media) if m.grid is not None]
        by_length: dict[int, list[int]] = {}
        for i, m in enumerate(forest.media):
            if m.grid is None:
                by_length.setdefault(min(m.tensor.shape[1], chunk), []).append(i)
        order = visual + [i for group in by_length.values() for i in group]
        start = np.zeros(len(forest.media), np.int64)
        start[order] = np.cumsum([0] + [forest.media[i].n_tokens for i in order[:-1]])[: len(order)]
        is_sound = np.array([m.grid is None for m in forest.media], bool)[forest.media_item]
        arrange = np.argsort(is_sound, kind="stable")
        rows = (start[forest.media_item] + forest.media_offset)[arrange]
        sounds = []
        for group in by_length.values():
            frames = np.concatenate([forest.media[i].tensor for i in group], 1)
            sounds.append(Sounds(tensor(frames), tensor(np.array([forest.media[i].tensor.shape[1] for i in group]))))
        return cls(
            ids=tensor(forest.ids),
            positions=tensor(forest.positions),
            end=tensor(forest.end),
            rows=tensor(forest.rows),
            media_tokens=tensor(forest.media_token[arrange]),
            media_rows=tensor(rows),
            n_visual=int((~is_sound).sum()),
            patches=tensor(np.concatenate([forest.media[i].tensor for i in visual])) if visual else None,
            grid=tensor(np.array([forest.media[i].grid for i in visual])) if visual else None,
            sounds=sounds,
            routes=None if forest.routes is None else [tensor(x) for x in forest.routes.transpose(1, 0, 2).astype(np.int64)],
        )

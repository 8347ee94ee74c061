"""One packed forest as tensors: what travels through the model, from its inputs to every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from relax_sdk.errors import TrainingError
from relax_server.models.processor import MediaFeatures
from relax_server.training.forest import Forest
from relax_server.training.megatron.flex import FlexMask, flex_mask

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Sounds:
    """Sounds that one call of the audio tower takes."""

    frames: Tensor
    """float32 [n_mels, all frames], on the CPU."""
    lengths: Tensor
    """int64 [n], frames of each."""


@dataclass(frozen=True)
class MediaInputs:
    """The media of one forest, each item once, and which tokens they stand for.

    All tensors are on the device, but for the inputs of towers. These are copied there when their forest is computed, as the
    forests of an update may not have room together.
    """

    tokens: Tensor
    """int64 [p], tokens that are placeholders."""
    rows: Tensor
    """int64 [p], their rows in the embeddings: visual items, then each element of `sounds`; empty without towers."""
    n_visual: int
    """How many of the p placeholders, counted from the first, are of images and videos."""
    patches: Tensor | None
    """float32 [all patches, channels], on the CPU; None without images and videos."""
    grid: Tensor | None
    """int64 [n visual items, 3]; None without images and videos."""
    sounds: list[Sounds]

    @classmethod
    def of(cls, forest: Forest, chunk: int, device: torch.device, towers: bool = True) -> MediaInputs:
        """Tensors of a forest's media.

        Args:
            forest: packed samples with at least one media item.
            chunk: frames of one full chunk of the audio tower. It pads chunks to the longest one of a call, which changes
                what a shorter one sees; so sounds shorter than a chunk are only put together with others of their length,
                and every sound is computed as if it were alone.
            device: where to put all but the inputs of towers.
            towers: False says only where the placeholders are, for a stage of the pipeline that has no tower; the forest's
                media may be outlines then.
        """
        parts = [part for m in forest.media for part in (m, m.sound) if part is not None]
        part, offset = _parts_of(forest)
        is_sound = np.array([p.grid is None for p in parts], bool)[part]
        arrange = np.argsort(is_sound, kind="stable")
        tokens, n_visual = _tensor(forest.media_token[arrange], device), int((~is_sound).sum())
        if not towers:
            return cls(tokens, tokens.new_zeros(0), n_visual, None, None, [])
        visual, by_length = _arrange(parts, chunk)
        order = visual + [i for group in by_length.values() for i in group]
        sizes = [p.n_visual if p.grid is not None else p.n_tokens for p in parts]
        start = np.zeros(len(parts), np.int64)
        start[order] = np.cumsum([0] + [sizes[i] for i in order[:-1]])
        sounds = []
        for group in by_length.values():
            frames = np.concatenate([parts[i].tensor for i in group], 1)
            lengths = np.array([parts[i].tensor.shape[1] for i in group])
            sounds.append(Sounds(_tensor(frames, HOST), _tensor(lengths, device)))
        return cls(
            tokens=tokens,
            rows=_tensor((start[part] + offset)[arrange], device),
            n_visual=n_visual,
            patches=_tensor(np.concatenate([parts[i].tensor for i in visual]), HOST) if visual else None,
            grid=_tensor(np.array([parts[i].grid for i in visual]), device) if visual else None,
            sounds=sounds,
        )


@dataclass(frozen=True)
class Context:
    """How a forest's tokens are divided over the ranks of context parallelism."""

    mine: Tensor
    """int64 [t], this rank's tokens in the whole forest, ascending."""
    order: Tensor
    """int64 [tokens of the whole forest], where each is among those of all ranks, one rank after the other."""

    @classmethod
    def of(cls, forest: Forest, device: torch.device) -> Context:
        """Tensors of a forest's share."""
        assert forest.share is not None
        return cls(_tensor(forest.share.mine, device), _tensor(forest.share.order, device))


@dataclass(kw_only=True, eq=False)
class MicroBatch(PackedSeqParams):
    """All that a model is told of one forest.

    Megatron hands its `packed_seq_params` through the decoder to every layer unchanged, and keeps them for the layers that
    it computes again in backward. So what belongs to one micro-batch is found here, never on a module, and micro-batches can
    be computed in any order.
    """

    qkv_format: str = "sbhd"
    """Megatron's own layout of queries, keys and values; "thd" would be that of its packed sequences, which are not used."""
    ids: Tensor
    """int64 [t]; of this rank's tokens with context parallelism, as all that follows but `end`."""
    positions: Tensor
    """float32 [3, t]."""
    end: Tensor
    """int64 [tokens of the whole forest], the mask: query q sees key k iff k <= q < end[k]."""
    rows: Tensor
    """int64 [r], tokens whose logits are wanted."""
    flex: FlexMask | None = None
    """The mask for FlexAttention; None: layers attend in dense blocks."""
    media: MediaInputs | None = None
    """None without media."""
    routes: dict[int, Tensor] = field(default_factory=dict)
    """int64 [n_hidden, top_k] by decoder layer, for mixtures of experts only: experts of each token, -1 where the model
    chooses. Empty: it chooses everywhere."""
    context: Context | None = None
    """Context parallelism; None: the tokens are those of the whole forest."""
    n_hidden: int
    """Tokens whose hidden states this rank has between layers: t, or its part of them with sequence parallelism."""
    deep_tokens: Tensor
    """int64 [d], visual placeholders among these."""
    deep_rows: Tensor
    """int64 [d], their rows among all visual placeholders of `media`."""
    deep: dict[int, Tensor] = field(default_factory=dict)
    """[d, 1, hidden] by decoder layer: DeepStack features that are added to its output; the model fills them in."""

    @classmethod
    def of(
        cls,
        forest: Forest,
        *,
        chunk: int,
        moe_layers: Sequence[bool],
        top_k: int,
        device: torch.device,
        flex: bool = False,
        tensor: tuple[int, int] = (0, 1),
        towers: bool = True,
    ) -> MicroBatch:
        """Tensors of a forest.

        Args:
            forest: packed samples; its length is a multiple of the sequence-parallel ranks.
            chunk: frames of one full chunk of the audio tower, see `MediaInputs.of`.
            moe_layers: which decoder layers are mixtures of experts.
            top_k: experts of a token in each of them.
            device: where to put them, but for the inputs of towers.
            flex: layers attend by FlexAttention.
            tensor: rank and size of the sequence-parallel group.
            towers: this rank has the towers, see `MediaInputs.of`.

        Raises:
            TrainingError: the forest's routes are of another model.
        """
        rank, size = tensor
        n_hidden = len(forest) // size
        first = rank * n_hidden
        routes: dict[int, Tensor] = {}
        if forest.routes is not None:
            layers, experts = forest.routes.shape[1:]
            if (layers, experts) != (len(moe_layers), top_k):
                raise TrainingError(
                    f"the recorded routes are of {layers} layers with {experts} experts a token, but this model has "
                    f"{len(moe_layers)} with {top_k}: does the engine serve another model?"
                )
            sparse = [i for i, is_moe in enumerate(moe_layers) if is_moe]
            own = forest.routes[first : first + n_hidden]
            routes = {i: _tensor(own[:, i].astype(np.int64), device) for i in sparse}
        end = _tensor(forest.end, device)
        media = MediaInputs.of(forest, chunk, device, towers) if forest.media else None
        visual = media.tokens[: media.n_visual] if media is not None else torch.zeros(0, dtype=torch.long, device=device)
        here = (visual >= first) & (visual < first + n_hidden)
        return cls(
            ids=_tensor(forest.ids, device),
            positions=_tensor(forest.positions, device),
            end=end,
            flex=flex_mask(end) if flex else None,
            rows=_tensor(forest.rows, device),
            media=media,
            routes=routes,
            context=Context.of(forest, device) if forest.share is not None else None,
            n_hidden=n_hidden,
            deep_tokens=visual[here] - first,
            deep_rows=here.nonzero()[:, 0],
        )


def _parts_of(forest: Forest) -> tuple[np.ndarray, np.ndarray]:
    """Part of a forest's media that each placeholder is of, and its row there; the parts are the items, and after each film its
    sound."""
    heard = np.array([m.sound is not None for m in forest.media], np.int64)
    first = np.arange(len(heard)) + np.cumsum(heard) - heard
    seen = np.array([m.n_visual for m in forest.media], np.int64)
    item, offset = forest.media_item, forest.media_offset
    of_sound = (heard[item] > 0) & (offset >= seen[item])
    return first[item] + of_sound, np.where(of_sound, offset - seen[item], offset)


def _arrange(media: Sequence[MediaFeatures], chunk: int) -> tuple[list[int], dict[int, list[int]]]:
    """Visual items, and sounds by the length that the tower's calls are made of."""
    visual = [i for i, m in enumerate(media) if m.grid is not None]
    by_length: dict[int, list[int]] = {}
    for i, m in enumerate(media):
        if m.grid is None:
            by_length.setdefault(min(m.tensor.shape[1], chunk), []).append(i)
    return visual, by_length


def _tensor(array: np.ndarray, device: torch.device) -> Any:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)

"""The model: one flattened forward over the KV pool, media towers with a cache, routed experts."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relax_sdk.errors import ConfigError
from relax_server.engines.embedded import attention, weights
from relax_server.engines.embedded.kv_pool import KVPool
from relax_server.models.device import this_device
from relax_server.models.families import Family, check_supported, family_of
from relax_server.models.media_features import MediaFeatures
from relax_server.models.weight_files import read_weights


@dataclass(frozen=True)
class Embedding:
    """One media item after its tower."""

    embeds: torch.Tensor
    """[n_tokens, hidden]."""
    deepstack: tuple[torch.Tensor, ...] = ()
    """Images and videos: per DeepStack layer [n_tokens, hidden] (arXiv 2406.04334)."""

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.embeds, *self.deepstack))


@dataclass(frozen=True)
class MediaRows:
    """Tokens of a flattened batch that are embeddings of a media item."""

    at: np.ndarray
    """int64 [n], where they are."""
    embedding: Embedding
    rows: np.ndarray
    """int64 [n], which of the item's embeddings they are."""


class ModelRunner:
    """A transformers model on the device of this process, a GPU where it sees one; used by one thread.

    Raises:
        ConfigError: the folder holds a model this engine does not run.
    """

    def __init__(self, path: Path, hf_config: Any, dtype: torch.dtype, record_routes: bool) -> None:
        self.family = family_of(hf_config.model_type, str(path))
        check_supported(self.family.text(hf_config), str(path))
        self.mrope = self.family.media is not None
        """Whether positions have three coordinates."""
        attention.register()
        self.device = this_device(dtype)
        self.model = _load(path, self.family, hf_config, dtype).to(self.device)
        self.model.eval().requires_grad_(False)
        self.text: Any = self.model.model.language_model if self.mrope else self.model.model
        config = self.text.config
        config._attn_implementation = attention.NAME
        self.dtype = dtype
        self.vocab_size: int = config.vocab_size
        self.context_length: int = config.max_position_embeddings
        self.layers: int = config.num_hidden_layers
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.route_top_k: int = getattr(config, "num_experts_per_tok", 0) or 0
        if record_routes and not self.route_top_k:
            raise ConfigError(f"{path}: --return-routed-experts, but {hf_config.model_type} has no experts")
        if record_routes:
            self._record_routes()
        self._layout: attention.BatchLayout | None = None
        self._shapes: dict[str, torch.Size] = {}
        weights.assign(self.model, read_weights(path))  # what cannot be updated later is refused now

    def new_pool(self, capacity: int, routes: bool) -> KVPool:
        top_k = self.route_top_k if routes else 0
        return KVPool(self.layers, self.kv_heads, self.head_dim, capacity, self.dtype, top_k, self.device)

    # ----------------------------------------------------------------------------------------------------- forward

    def forward(
        self, ids: np.ndarray, positions: np.ndarray, layout: attention.BatchLayout, media: Sequence[MediaRows]
    ) -> torch.Tensor:
        """One pass over a flattened batch.

        Args:
            ids: int64 [tokens].
            positions: int64 [tokens] for text models, float32 [3, tokens] where they have three coordinates.
            layout: from `attention.plan`.
            media: what replaces the embeddings of placeholders, in the order of the tokens.

        Returns:
            [tokens, hidden], after the last norm.
        """
        embeds = self.text.embed_tokens(torch.from_numpy(ids).to(self.device))
        extra: dict[str, Any] = {}
        if media:
            for m in media:
                at, rows = (torch.from_numpy(x).to(self.device) for x in (m.at, m.rows))
                embeds[at] = m.embedding.embeds[rows]
            extra = _deepstack(media, len(ids))
        places = torch.from_numpy(positions).to(self.device)
        self._layout = layout
        try:
            out = self.text(
                inputs_embeds=embeds[None],
                position_ids=places[:, None] if self.mrope else places[None],
                use_cache=False,
                layout=layout,
                **extra,
            )
        finally:
            self._layout = None
        return out.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary]."""
        return self.model.lm_head(hidden).float()

    def _record_routes(self) -> None:
        for index, layer in enumerate(self.text.layers):
            gate = getattr(layer.mlp, "gate", None)
            if gate is not None:
                gate.register_forward_hook(self._route_hook(index))

    def _route_hook(self, index: int) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            layout = self._layout
            if layout is not None and layout.pool.routes is not None:
                layout.pool.routes[layout.slots, index] = output[2].to(torch.int16)

        return hook

    # ------------------------------------------------------------------------------------------------------ towers

    def embed_media(self, items: Sequence[MediaFeatures]) -> list[Embedding]:
        """Run the towers: all images and videos in one pass, sounds in others."""
        seen: dict[int, Embedding] = {}
        visual = [i for i, f in enumerate(items) if f.grid is not None]
        if visual:
            grids = torch.tensor([items[i].grid for i in visual], device=self.device)
            pixels = torch.from_numpy(np.concatenate([items[i].tensor for i in visual])).to(self.device, self.dtype)
            done = self.model.model.visual(pixels, grid_thw=grids)
            sizes = [items[i].n_visual for i in visual]
            deep = getattr(done, "deepstack_features", None) or ()
            parts = zip(done.pooler_output.split(sizes), *(f.split(sizes) for f in deep), strict=True)
            for i, (embeds, *deepstack) in zip(visual, parts, strict=True):
                seen[i] = Embedding(embeds.clone(), tuple(d.clone() for d in deepstack))
        heard: dict[int, torch.Tensor] = {}
        sounds = {i: sound for i, f in enumerate(items) if (sound := f.heard) is not None}
        for batch in self._sound_batches(sounds):
            lengths = torch.tensor([sounds[i].tensor.shape[1] for i in batch], device=self.device)
            frames = torch.from_numpy(np.concatenate([sounds[i].tensor for i in batch], 1)).to(self.device, self.dtype)
            done = self.model.model.audio_tower(frames, feature_lens=lengths)
            sizes = [sounds[i].n_tokens for i in batch]
            heard |= {i: embeds.clone() for i, embeds in zip(batch, done.last_hidden_state.split(sizes), strict=True)}
        return [_joined(seen.get(i), heard.get(i)) for i in range(len(items))]

    def _sound_batches(self, sounds: Mapping[int, MediaFeatures]) -> list[list[int]]:
        """Sounds that may share a pass of the tower: those of a full window, and shorter ones of equal length.

        The tower pads all windows of a call to the longest, so that a shorter sound would come out differently beside others
        than alone, and the trainer takes each as if alone.
        """
        batches: dict[int, list[int]] = {}
        for i, sound in sounds.items():
            window = 2 * self.model.config.audio_config.n_window
            batches.setdefault(min(sound.tensor.shape[1], window), []).append(i)
        return list(batches.values())

    # ----------------------------------------------------------------------------------------------------- weights

    def drop_weights(self) -> None:
        """Give the memory of all parameters back."""
        self._shapes = {name: p.shape for name, p in self.model.named_parameters()}
        for parameter in self.model.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)

    def allocate_weights(self) -> None:
        """Take the memory again; values are undefined until weights are loaded."""
        for name, parameter in self.model.named_parameters():
            parameter.data = torch.empty(self._shapes[name], dtype=parameter.dtype, device=self.device)


def _deepstack(media: Sequence[MediaRows], n: int) -> dict[str, Any]:
    """Arguments of transformers' decoders for what is added to the first layers' outputs at some of n tokens."""
    deep = [m for m in media if m.embedding.deepstack]
    if not deep:
        return {}
    which = [torch.from_numpy(np.flatnonzero(m.rows < len(m.embedding.deepstack[0]))) for m in deep]  # a film's own rows
    mask = torch.zeros(1, n, dtype=torch.bool)
    for m, some in zip(deep, which, strict=True):
        mask[0, torch.from_numpy(m.at)[some]] = True
    device = deep[0].embedding.embeds.device
    rows = [torch.from_numpy(m.rows)[some].to(device) for m, some in zip(deep, which, strict=True)]
    layers = range(len(deep[0].embedding.deepstack))
    features = [torch.cat([m.embedding.deepstack[i][own] for m, own in zip(deep, rows, strict=True)]) for i in layers]
    return {"visual_pos_masks": mask.to(device), "deepstack_visual_embeds": features}


def _joined(seen: Embedding | None, heard: torch.Tensor | None) -> Embedding:
    """The embeddings of an item that is seen, heard, or both: a film's sound is after its pictures."""
    if heard is None:
        assert seen is not None
        return seen
    return Embedding(heard) if seen is None else Embedding(torch.cat((seen.embeds, heard)), seen.deepstack)


def _load(path: Path, family: Family, hf_config: Any, dtype: torch.dtype) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    more = {} if family.whole is None else {"config": hf_config, "key_mapping": {f"^{re.escape(family.whole.prefix)}": ""}}
    try:
        return family.model_class().from_pretrained(path, dtype=dtype, local_files_only=True, **more)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be loaded ({error})") from error


class EmbeddingCache:
    """Tower outputs by media, least recently used first out; must be flushed whenever the weights change."""

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._items: OrderedDict[int, Embedding] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: int) -> Embedding | None:
        found = self._items.get(key)
        if found is not None:
            self._items.move_to_end(key)
        return found

    def put(self, key: int, value: Embedding) -> None:
        if key not in self._items:
            self._items[key] = value
            self.nbytes += value.nbytes
        while self.nbytes > self.max_bytes and len(self._items) > 1:
            self.nbytes -= self._items.popitem(last=False)[1].nbytes

    def flush(self) -> None:
        self._items.clear()
        self.nbytes = 0

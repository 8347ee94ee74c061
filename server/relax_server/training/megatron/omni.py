"""Models that see, and some that hear: the Hugging Face towers of their family in front of a Megatron decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relax_server.models.towers import recompute_layers
from relax_server.training.megatron.forest_model import ForestModel
from relax_server.training.megatron.micro_batch import MediaInputs, MicroBatch


def _channels_last(convolution: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same convolution with channels innermost, for which oneDNN's backward pass is 2 to 4 times as fast on a CPU."""
    return (args[0].contiguous(memory_format=torch.channels_last),)


class OmniModel(ForestModel):
    """Every media item of a forest passes its tower once; its embeddings replace placeholders wherever they occur.

    Args:
        config: Megatron's.
        hf_config: of a family that takes media.
        device: where parameters and buffers live.
        part: number of this part of the rank's stage.
    """

    visual: Any
    audio_tower: Any

    def __init__(self, config: Any, hf_config: Any, device: torch.device, part: int = 0) -> None:
        super().__init__(config, hf_config, device, part)
        rule = self.family.media
        assert rule is not None
        self.n_deep = len(getattr(hf_config.vision_config, "deepstack_visual_indexes", None) or ())
        if rule.audio is not None:
            self.audio_chunk = 2 * hf_config.audio_config.n_window
        if not self.place.first:
            return
        for name, tower in rule.towers.items():
            setattr(self, name, tower.build(hf_config))
            if config.recompute_granularity == "full":
                recompute_layers(getattr(self, name))
        if rule.audio is None:
            return
        if device.type == "cpu":
            for module in self.audio_tower.modules():
                if isinstance(module, torch.nn.Conv2d):
                    module.register_forward_pre_hook(_channels_last)

    def _to_tower(self, features: Tensor) -> Tensor:
        return features.to(self.device, self.config.params_dtype)

    def _see(self, media: MediaInputs) -> tuple[Tensor, list[Tensor]]:
        """Embeddings [n, hidden] of images and videos, and their DeepStack features."""
        assert media.patches is not None
        out = self.visual(self._to_tower(media.patches), grid_thw=media.grid)
        return out.pooler_output, list(getattr(out, "deepstack_features", None) or ())

    def embed(self, micro: MicroBatch) -> tuple[Tensor, list[Tensor]]:
        """Token embeddings with media in their places, [t, 1, hidden], and DeepStack features for the first layers: those of
        an early vision layer are added to the output of a decoder layer."""
        hidden, _ = super().embed(micro)
        media = micro.media
        if media is None:
            return hidden, []
        embeddings: list[Tensor] = []
        deep: list[Tensor] = []
        if media.patches is not None:
            seen, features = self._see(media)
            embeddings.append(seen)
            rows = media.rows[: media.n_visual]
            deep = [f.index_select(0, rows).to(hidden.dtype)[:, None] for f in features]
        for sounds in media.sounds:
            heard = self.audio_tower(self._to_tower(sounds.frames), feature_lens=sounds.lengths)
            embeddings.append(heard.last_hidden_state)
        rows = torch.cat(embeddings).to(hidden.dtype).index_select(0, media.rows)
        hidden = hidden.index_copy(0, media.tokens, rows[:, None])
        return hidden, deep

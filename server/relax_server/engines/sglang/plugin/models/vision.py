"""Models that see: Qwen2.5-VL, and Qwen3-VL dense and as a mixture of experts. Their positions are whole numbers."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.models import qwen2_5_vl, qwen3_vl, qwen3_vl_moe

from relax_server.engines.sglang.plugin.models.served import Served


class Qwen2_5_VLForConditionalGeneration(Served, qwen2_5_vl.Qwen2_5_VLForConditionalGeneration):
    """The names of these classes are the architectures that folders state."""

    def get_image_feature(self, items: list[Any]) -> torch.Tensor:
        """Embeddings of pictures, [tokens, width]; SGLang's own takes patches of another size than 14 for embeddings."""
        return self._seen(items, torch.cat([item.image_grid_thw for item in items]))

    def get_video_feature(self, items: list[Any]) -> torch.Tensor:
        """Embeddings of films, [tokens, width]. A temporal patch sees itself alone, as in transformers; in SGLang's own it sees
        the whole film in some layers."""
        grids = torch.cat([item.video_grid_thw for item in items])
        single = torch.cat([torch.ones_like(grids[:, :1]), grids[:, 1:]], 1)
        return self._seen(items, single.repeat_interleave(grids[:, 0], 0))

    def _seen(self, items: list[Any], grids: torch.Tensor) -> torch.Tensor:
        return self.visual(torch.cat([item.feature for item in items]).to(self.visual.dtype), grid_thw=grids)


class Qwen3VLForConditionalGeneration(Served, qwen3_vl.Qwen3VLForConditionalGeneration):
    """Dense."""


class Qwen3VLMoeForConditionalGeneration(Served, qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration):
    """A mixture of experts."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        # SGLang's own counts on three, as the published models have.
        self.model.deepstack_embed_to_decoder_layer = range(len(config.vision_config.deepstack_visual_indexes))


EntryClass: list[Any] = [
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
]

"""The Qwen3-Omni-MoE thinker as a model of its own, with fractional positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.rotary_embedding.mrope import apply_interleaved_rope
from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb
from sglang.srt.models.qwen3_omni_moe import (
    Qwen3OmniMoeForConditionalGeneration,
)
from sglang.srt.models.qwen3_omni_moe import (
    Qwen3OmniMoeThinkerForConditionalGeneration as Thinker,
)
from torch import nn

from relax_server.engines.sglang.plugin.models.served import Served
from relax_server.engines.sglang.plugin.positions import POSITIONS


class FractionalRope(nn.Module):
    """Interleaved M-RoPE (Qwen3-VL, section 2.1) at positions that need not be whole; SGLang's looks angles up in a table."""

    def __init__(self, rope: Any) -> None:
        super().__init__()
        self.rope = rope
        self.register_buffer("inv_freq", rope._compute_inv_freq(rope.base).float(), persistent=False)
        self._angles: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        """Positions, and their cosines and sines: the same for all layers."""

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, fused_set_kv_buffer_arg: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys [tokens, heads * head size] by positions [3, tokens] or [tokens]."""
        if self._angles is None or self._angles[0] is not positions:
            rows = positions if positions.ndim == 2 else positions.expand(3, -1)
            angles = rows.float()[:, :, None] * self.inv_freq.to(rows.device)
            parts = (apply_interleaved_rope(part, self.rope.mrope_section) for part in (angles.cos(), angles.sin()))
            self._angles = (positions, *parts)  # type: ignore[assignment]
        _, cos, sin = self._angles
        return self._rotate(query, cos, sin), self._rotate(key, cos, sin)

    def _rotate(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = states.view(len(states), -1, self.rope.head_size)
        turned = apply_rotary_emb(heads[..., : self.rope.rotary_dim], cos, sin, self.rope.is_neox_style)
        return torch.cat((turned, heads[..., self.rope.rotary_dim :]), -1).reshape(states.shape)


class Qwen3OmniMoeThinkerForConditionalGeneration(Served, Thinker):
    """The thinker as transformers saves it alone. The name is the architecture that such folders state."""

    enable_talker = False
    prefix_of_whole = "thinker."

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        layers = [layer for layer in self.model.layers if hasattr(layer, "self_attn")]
        rope = FractionalRope(layers[0].self_attn.rotary_emb)
        for layer in layers:
            layer.self_attn.rotary_emb = rope

    def get_audio_feature(self, items: list[Any]) -> torch.Tensor:
        """Embeddings of sounds, [tokens, width]; SGLang's own stacks them, which ends it where two differ in length."""
        tower = self.audio_tower
        device, dtype = next(tower.parameters()).device, tower.dtype
        frames = torch.cat([item.feature[0] for item in items], -1).to(device, dtype)
        lengths = torch.tensor([item.feature.shape[-1] for item in items], device=device)
        return tower(frames, feature_lens=lengths).last_hidden_state

    def take_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Load tensors as the whole model's class does, of which the thinker is a part."""
        return Qwen3OmniMoeForConditionalGeneration.load_weights(self, weights)  # type: ignore[arg-type] - by its names

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """As SGLang's, at positions that need not be whole."""
        forward_batch.mrope_positions = batch_positions(forward_batch)
        return super().forward(input_ids, positions, forward_batch, *args, **kwargs)


def batch_positions(batch: Any) -> torch.Tensor:
    """Positions of all tokens that go through the model now: [3, tokens], float32 where a request has media."""
    requests = batch.mm_inputs
    if not requests or all(request is None for request in requests):
        return batch.mrope_positions
    if batch.forward_mode.is_decode():
        spans = [(int(n) - 1, 1) for n in batch.seq_lens_cpu]
    else:
        spans = list(zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True))
    rows = [request_positions(request, start, n) for request, (start, n) in zip(requests, spans, strict=True)]
    return torch.cat(rows, 1).to(batch.mrope_positions.device)


def request_positions(request: Any, start: int, n: int) -> torch.Tensor:
    """Positions of tokens `start` to `start + n` of one request: float32 [3, n]."""
    items = request.mm_items if request is not None else ()
    prompt = next((item.model_specific_data[POSITIONS] for item in items if POSITIONS in item.model_specific_data), None)
    if prompt is None:
        return torch.arange(start, start + n, dtype=torch.float32).expand(3, -1)
    length = prompt.shape[1]
    after = torch.arange(max(start, length), max(start + n, length), dtype=torch.float32) - length + prompt.max() + 1
    return torch.cat((prompt[:, start : start + n], after.expand(3, -1)), 1)


EntryClass = Qwen3OmniMoeThinkerForConditionalGeneration

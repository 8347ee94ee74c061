"""The Qwen3-Omni thinker: the Hugging Face vision and audio towers in front of a Megatron decoder."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from relax_server.training.megatron.config import text_config
from relax_server.training.megatron.inputs import ForestInputs
from relax_server.training.megatron.text import TextModel


class _Leaves:
    """Copies of the DeepStack features on which recomputed layers leave their gradients."""

    def __init__(self, features: list[Tensor]) -> None:
        self.tensors = [f.detach().requires_grad_() for f in features]


class _HandBack(torch.autograd.Function):
    """The hidden states unchanged; in backward, which runs after every layer's, the leaves' gradients go to the tower.

    Recomputed layers run a backward pass of their own each. Were they to reach the vision tower directly, its graph would
    be walked once per layer, which autograd refuses.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, leaves: _Leaves, *features: Tensor) -> Tensor:
        ctx.leaves = leaves
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (gradient, None, *(leaf.grad for leaf in ctx.leaves.tensors))


class _ChannelsLast(torch.nn.Conv2d):
    """The same convolution with channels innermost, for which oneDNN's backward pass is 2 to 4 times as fast on a CPU."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        layout = torch.channels_last
        return super()._conv_forward(input.contiguous(memory_format=layout), weight.contiguous(memory_format=layout), bias)


class OmniModel(TextModel):
    """Every media item of a forest passes its tower once; its embeddings replace placeholders wherever they occur.

    Args:
        config: Megatron's.
        hf_config: a Qwen3-Omni-MoE thinker's.
        device: where parameters and buffers live.
    """

    def __init__(self, config: Any, hf_config: Any, device: torch.device) -> None:
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
            Qwen3OmniMoeAudioEncoder,
            Qwen3OmniMoeVisionEncoder,
        )

        super().__init__(config, hf_config, device, text_config(hf_config).rope_parameters["mrope_section"])
        self.visual = Qwen3OmniMoeVisionEncoder._from_config(hf_config.vision_config)
        self.audio_tower = Qwen3OmniMoeAudioEncoder._from_config(hf_config.audio_config)
        if device.type == "cpu":
            for module in self.audio_tower.modules():
                if type(module) is torch.nn.Conv2d:
                    module.__class__ = _ChannelsLast
        self._deep: list[Tensor] = []
        self._deep_tokens: Tensor | None = None
        for i in range(len(hf_config.vision_config.deepstack_visual_indexes)):
            self.gpt.decoder.layers[i].register_forward_hook(functools.partial(self._add_deep, i))

    def _add_deep(self, layer: int, module: torch.nn.Module, args: Any, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """DeepStack: features of an early vision layer are added to the output of the decoder's `layer`."""
        if self._deep_tokens is None:
            return out
        return (out[0].index_add(0, self._deep_tokens, self._deep[layer]), *out[1:])

    def _see(self, inputs: ForestInputs) -> tuple[Tensor, list[Tensor]]:
        """Embeddings [n, hidden] of images and videos, and their DeepStack features."""
        assert inputs.patches is not None
        out = self.visual(inputs.patches.to(self.config.params_dtype), grid_thw=inputs.grid)
        return out.pooler_output, list(out.deepstack_features)

    def embed(self, inputs: ForestInputs) -> Tensor:
        """Token embeddings with media in their places, [t, 1, hidden]; keeps the DeepStack features for the layers."""
        hidden = super().embed(inputs)
        self._deep, self._deep_tokens = [], None
        media: list[Tensor] = []
        if inputs.patches is not None:
            seen, deep = self._see(inputs)
            media.append(seen)
            self._deep_tokens = inputs.media_tokens[: inputs.n_visual]
            rows = inputs.media_rows[: inputs.n_visual]
            self._deep = [f.index_select(0, rows).to(hidden.dtype)[:, None] for f in deep]
        for sounds in inputs.sounds:
            heard = self.audio_tower(sounds.frames.to(self.config.params_dtype), feature_lens=sounds.lengths)
            media.append(heard.last_hidden_state)
        if not media:
            return hidden
        features = torch.cat(media).to(hidden.dtype).index_select(0, inputs.media_rows)
        hidden = hidden.index_copy(0, inputs.media_tokens, features[:, None])
        if self._deep and self.config.recompute_granularity == "full" and torch.is_grad_enabled():
            leaves = _Leaves(self._deep)
            hidden = _HandBack.apply(hidden, leaves, *self._deep)  # type: ignore[assignment]
            self._deep = leaves.tensors
        return hidden

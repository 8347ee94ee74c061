"""A Megatron GPTModel over packed forests."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from relax_server.models.families import Family, family_of
from relax_server.training.forest import Forest
from relax_server.training.megatron.config import moe_layers
from relax_server.training.megatron.layer import block_spec
from relax_server.training.megatron.micro_batch import MicroBatch
from relax_server.training.megatron.rope import ForestRotary, inverse_frequencies
from relax_server.training.scoring import Predictions


class ForestGPT(GPTModel):
    """Megatron's model without its output layer's logits: states [r, width] where a trained token is predicted."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, packed_seq_params: MicroBatch, **kwargs: Any) -> Tensor:
        return hidden_states[:, 0].index_select(0, packed_seq_params.rows)


class ForestModel(MegatronModule):
    """A language model of any family; `OmniModel` adds towers.

    Args:
        config: Megatron's, see `config.transformer_config`.
        hf_config: the Hugging Face configuration it was made from.
        device: where parameters and buffers live.
    """

    def __init__(self, config: Any, hf_config: Any, device: torch.device) -> None:
        super().__init__(config)
        self.family: Family = family_of(hf_config.model_type)
        c, media = self.family.text(hf_config), self.family.media
        self.pre_process = self.post_process = True
        self.share_embeddings_and_output_weights = bool(hf_config.tie_word_embeddings)
        self.moe_layers = moe_layers(c)
        self.device = device
        self.flex = False
        """Layers attend by FlexAttention."""
        self.audio_chunk = 0
        """Frames of a full chunk of the audio tower, if there is one."""
        self.gpt = ForestGPT(
            config,
            block_spec(self.moe_layers, config.num_moe_experts, self.family.qk_norm),  # type: ignore[arg-type]
            vocab_size=c.vocab_size,
            max_sequence_length=c.max_position_embeddings,
            position_embedding_type="mrope",
            share_embeddings_and_output_weights=self.share_embeddings_and_output_weights,
        )
        sections = None if media is None else c.rope_parameters["mrope_section"]
        interleaved = media is None or media.mrope == "interleaved"
        rotary: Any = ForestRotary(inverse_frequencies(c), sections, device, interleaved)
        self.gpt.rotary_pos_emb = rotary
        self.model_type = self.gpt.model_type

    def set_input_tensor(self, tensor: Any) -> None:
        """Called by Megatron's schedules; there is one pipeline stage, so it is always None."""
        self.gpt.set_input_tensor(tensor)

    def shared_embedding_or_output_weight(self) -> Tensor:
        """Called by Megatron when gradients are finalised."""
        return self.gpt.shared_embedding_or_output_weight()

    def micro_batch(self, forest: Forest) -> MicroBatch:
        """Put a forest on this model's device, as `forward` takes it.

        Raises:
            TrainingError: the forest's routes are of another model.
        """
        return MicroBatch.of(
            forest,
            chunk=self.audio_chunk,
            moe_layers=self.moe_layers,
            top_k=self.config.moe_router_topk,
            device=self.device,
            flex=self.flex,
        )

    def embed(self, micro: MicroBatch) -> tuple[Tensor, dict[int, Tensor]]:
        """Token embeddings [t, 1, hidden], and features for later layers as in `MicroBatch.deep`."""
        return self.gpt.embedding(micro.ids[None], None), {}

    def forward(self, micro: MicroBatch) -> Tensor:
        """States [r, width] of the wanted rows of one forest; `predictions` makes what is predicted of them."""
        hidden, deep = self.embed(micro)
        told = dataclasses.replace(micro, deep=deep)
        return self.gpt(None, micro.positions[:, None], None, decoder_input=hidden, packed_seq_params=told)

    def predictions(self, hidden: Tensor) -> Predictions:
        """Pair what `forward` returned with the weight of the output layer, which may be that of the embedding."""
        tied = self.share_embeddings_and_output_weights
        weight: Any = self.shared_embedding_or_output_weight() if tied else self.gpt.output_layer.weight
        return Predictions(hidden, weight)

"""A Megatron GPTModel over packed forests."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from relax_server.models.division import moe_layers, stage_parts
from relax_server.models.families import Family, family_of
from relax_server.training.forest import Forest
from relax_server.training.megatron import parallel
from relax_server.training.megatron.deepstack import leave_gradients
from relax_server.training.megatron.layer import block_spec
from relax_server.training.megatron.micro_batch import MicroBatch
from relax_server.training.megatron.place import Place
from relax_server.training.megatron.rope import ForestRotary, inverse_frequencies
from relax_server.training.scoring import Predictions


class ForestGPT(GPTModel):
    """Megatron's model without its output layer's logits: states [r, width] where a trained token is predicted."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, packed_seq_params: MicroBatch, **kwargs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:  # the scores sum the gradient over the ranks themselves: the gather only cuts it
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return hidden_states[:, 0].index_select(0, packed_seq_params.rows)


class ForestModel(MegatronModule):
    """A rank's part of a language model of any family: layers of its stage, and its share of heads, channels and experts.
    `OmniModel` adds towers. Of an interleaved pipeline a rank has several, see `InterleavedModel`.

    Args:
        config: Megatron's, see `config.transformer_config`.
        hf_config: the Hugging Face configuration it was made from.
        device: where parameters and buffers live.
        part: number of this part of the rank's stage.
    """

    def __init__(self, config: Any, hf_config: Any, device: torch.device, part: int = 0) -> None:
        super().__init__(config)
        self.family: Family = family_of(hf_config.model_type)
        c, media = self.family.text(hf_config), self.family.media
        parts = stage_parts(c.num_hidden_layers, parallel.layout(), parallel.stage())
        self.pre_process = parallel.is_first_stage() and part == 0
        self.post_process = parallel.is_last_stage() and part == len(parts) - 1
        self.share_embeddings_and_output_weights = bool(hf_config.tie_word_embeddings)
        self.moe_layers = moe_layers(c)
        """Whether each decoder layer of the whole model is a mixture of experts."""
        self.device = device
        self.flex = False
        """Layers attend by FlexAttention."""
        self.audio_chunk = 0
        """Frames of a full chunk of the audio tower, if there is one."""
        self.n_deep = 0
        """Decoder layers, from the first, that get DeepStack features."""
        own = parts[part]
        self.place = Place.here(own, config.num_moe_experts or 0, first=self.pre_process, last=self.post_process)
        self.gpt = ForestGPT(
            config,
            block_spec([self.moe_layers[i] for i in own], config.num_moe_experts, self.family.qk_norm),  # type: ignore[arg-type]
            vocab_size=c.vocab_size,
            max_sequence_length=c.max_position_embeddings,
            pre_process=self.pre_process,
            post_process=self.post_process,
            position_embedding_type="mrope",
            scatter_embedding_sequence_parallel=False,  # media take their places first
            share_embeddings_and_output_weights=self.share_embeddings_and_output_weights,
            vp_stage=part if len(parts) > 1 else None,
        )
        sections = None if media is None else c.rope_parameters["mrope_section"]
        interleaved = media is None or media.mrope == "interleaved"
        rotary: Any = ForestRotary(inverse_frequencies(c), sections, device, interleaved)
        self.gpt.rotary_pos_emb = rotary
        self.model_type = self.gpt.model_type
        self._input: Tensor | None = None

    def named_parts(self) -> list[tuple[str, ForestModel]]:
        """All parts that this rank has, and what the names of their parameters begin with in the rank's model."""
        return [("", self)]

    def set_input_tensor(self, tensor: Any) -> None:
        """Called by Megatron's schedules with what the stage before returned; None on the first stage."""
        self._input = tensor[0] if isinstance(tensor, list) else tensor

    def shared_embedding_or_output_weight(self) -> Tensor:
        """Called by Megatron when gradients are finalised."""
        return self.gpt.shared_embedding_or_output_weight()

    def micro_batch(self, forest: Forest) -> MicroBatch:
        """Make the tensors of a forest that `forward` takes; all but the inputs of towers are on this model's device.

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
            tensor=parallel.tensor_parallel() if self.config.sequence_parallel else (0, 1),
            towers=self.place.first,
        )

    def embed(self, micro: MicroBatch) -> tuple[Tensor, list[Tensor]]:
        """Token embeddings [t, 1, hidden] with media in their places, and the DeepStack features [n_visual, 1, hidden] of each
        of the first decoder layers, all of them on every tensor-parallel rank."""
        return self.gpt.embedding(micro.ids[None], None), []

    def forward(self, micro: MicroBatch) -> Tensor:
        """Compute one forest.

        Returns:
            On the last stage, the states [r, width] of the wanted rows; `predictions` makes what is predicted of them. Before
            it, what the next part takes: hidden states [t, 1, hidden], of this rank's tokens, and after them the features of
            each later layer.
        """
        place = self.place
        if place.first:
            hidden, deep = self.embed(micro)
            if self.config.sequence_parallel:
                hidden = scatter_to_sequence_parallel_region(hidden)  # backward: every rank's towers get the whole gradient,
                deep = [copy_to_tensor_model_parallel_region(f) for f in deep]  # and here: a rank adds to its tokens only
            if len(micro.deep_rows) < (micro.media.n_visual if micro.media is not None else 0):
                deep = [f.index_select(0, micro.deep_rows) for f in deep]
        else:
            assert self._input is not None
            hidden, rest = self._input[: micro.n_hidden], self._input[micro.n_hidden :]
            deep = [*rest.chunk(self.n_deep - place.layers[0])] if len(rest) else []
        if place.first and self.config.recompute_granularity == "full" and torch.is_grad_enabled() and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()  # a recomputed layer has no gradient where no input of it has one
        now, later = deep[: len(place.layers)], deep[len(place.layers) :]
        if now and self.config.recompute_granularity == "full" and torch.is_grad_enabled():
            hidden, now = leave_gradients(hidden, now)
        told = dataclasses.replace(micro, deep=dict(zip(place.layers, now, strict=False)))
        if not place.first:
            self.gpt.set_input_tensor(hidden)
        out = self.gpt(
            None, micro.positions[:, None], None, decoder_input=hidden if place.first else None, packed_seq_params=told
        )
        return torch.cat([out, *later]) if later else out

    def predictions(self, hidden: Tensor) -> Predictions:
        """Pair what `forward` returned with the weight of the output layer, which may be that of the embedding."""
        tied = self.share_embeddings_and_output_weights
        weight: Any = self.shared_embedding_or_output_weight() if tied else self.gpt.output_layer.weight
        return Predictions(hidden, weight, parallel.vocabulary())

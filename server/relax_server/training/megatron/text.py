"""A Megatron GPTModel over packed forests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule

from relax_server.training.megatron.attention import block_spec
from relax_server.training.megatron.config import has_qk_norm, moe_layers, text_config
from relax_server.training.megatron.inputs import ForestInputs
from relax_server.training.megatron.rope import ForestRotary, inverse_frequencies


class TextModel(MegatronModule):
    """Llama, Qwen2, Qwen3 or Qwen3-MoE.

    Args:
        config: Megatron's, see `config.transformer_config`.
        hf_config: the Hugging Face configuration it was made from.
        device: where parameters and buffers live.
        sections: of interleaved M-RoPE; None for text.
    """

    def __init__(self, config: Any, hf_config: Any, device: torch.device, sections: Sequence[int] | None = None) -> None:
        super().__init__(config)
        c = text_config(hf_config)
        self.pre_process = self.post_process = True
        self.share_embeddings_and_output_weights = bool(hf_config.tie_word_embeddings)
        sparse = moe_layers(c)
        self.gpt = GPTModel(
            config,
            block_spec(sparse, config.num_moe_experts if any(sparse) else None, has_qk_norm(c)),  # type: ignore[arg-type]
            vocab_size=c.vocab_size,
            max_sequence_length=c.max_position_embeddings,
            position_embedding_type="mrope",
            share_embeddings_and_output_weights=self.share_embeddings_and_output_weights,
        )
        rotary: Any = ForestRotary(inverse_frequencies(c), sections, device)
        self.gpt.rotary_pos_emb = rotary
        self.model_type = self.gpt.model_type
        self._rows: torch.Tensor | None = None
        self.gpt.output_layer.register_forward_pre_hook(self._keep_rows)

    def _keep_rows(self, module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Logits only where a trained token is predicted."""
        return (args[0].index_select(0, self._rows), *args[1:])

    def set_input_tensor(self, tensor: Any) -> None:
        """Called by Megatron's schedules; there is one pipeline stage, so it is always None."""
        self.gpt.set_input_tensor(tensor)

    def shared_embedding_or_output_weight(self) -> torch.Tensor:
        """Called by Megatron when gradients are finalised."""
        return self.gpt.shared_embedding_or_output_weight()

    def embed(self, inputs: ForestInputs) -> torch.Tensor:
        """Token embeddings [t, 1, hidden]."""
        return self.gpt.embedding(inputs.ids[None], None)

    def decode(self, inputs: ForestInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [r, vocabulary] from embeddings [t, 1, hidden]."""
        self._rows = inputs.rows
        logits = self.gpt(None, inputs.positions[:, None], inputs.end.view(1, 1, 1, -1), decoder_input=hidden)
        return logits[0]

    def forward(self, inputs: ForestInputs) -> torch.Tensor:
        """Logits [r, vocabulary] of the wanted rows of one forest."""
        return self.decode(inputs, self.embed(inputs))

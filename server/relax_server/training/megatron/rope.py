"""Rotary positions that are given from outside: three equal rows for text, M-RoPE for models that see.

Megatron's plain `rope` counts positions itself and ignores the ones it is given, which is wrong for packed forests. Its
`mrope` honours them, but lays the three coordinates out in blocks, as Qwen2.5 does, whereas Qwen3 interleaves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from relax_sdk.errors import ConfigError

SCALINGS = ("default", "linear", "llama3")


def inverse_frequencies(config: Any) -> torch.Tensor:
    """The rotary frequencies of a Hugging Face text configuration, scaled as transformers scales them.

    Returns:
        float32 [head_dim / 2].

    Raises:
        ConfigError: a kind of scaling that depends on the sequence length or changes the attention scores.
    """
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in SCALINGS or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"{config.model_type}: rope_parameters {dict(rope)} cannot be trained; allowed: rope_type {', '.join(SCALINGS)} "
            "with partial_rotary_factor 1"
        )
    if kind == "default":
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float()


class ForestRotary(nn.Module):
    """Angles from positions; takes the place of `GPTModel.rotary_pos_emb`.

    Args:
        frequencies: float32 [d / 2]; kept as a plain attribute, so that no cast to bfloat16 can reach it.
        sections: channels of (time, height, width) of M-RoPE, or None for text (row 0 is used).
        interleaved: how channels are dealt to the coordinates: in turn (Qwen3), or in three blocks (Qwen2.5).
    """

    def __init__(
        self, frequencies: torch.Tensor, sections: Sequence[int] | None, device: torch.device, interleaved: bool = True
    ) -> None:
        super().__init__()
        self.frequencies = frequencies.to(device)
        self.source: torch.Tensor | None = None
        if sections is not None:
            row = torch.zeros(len(frequencies), dtype=torch.long)
            for coordinate in (1, 2) if interleaved else ():
                row[coordinate : 3 * sections[coordinate] : 3] = coordinate
            if not interleaved:
                row = torch.repeat_interleave(torch.arange(3), torch.tensor(list(sections)))
            self.source = row.to(device)

    def forward(self, position_ids: torch.Tensor, mrope_section: Any = None, cp_group: Any = None) -> torch.Tensor:
        """Angles of every token.

        Args:
            position_ids: float or int [3, 1, t].

        Returns:
            float32 [t, 1, 1, d].
        """
        positions = position_ids[:, 0].float()
        if self.source is None:
            angles = positions[0, :, None] * self.frequencies
        else:
            angles = positions.t().index_select(1, self.source) * self.frequencies
        return torch.cat((angles, angles), -1)[:, None, None]

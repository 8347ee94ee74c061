"""Which part of a model a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Group(Enum):
    """Groups of ranks that divide tensors among them."""

    TENSOR = "tensor"
    """Divides heads, channels and vocabulary."""
    EXPERT_TENSOR = "expert tensor"
    """Divides the channels of each expert."""
    EXPERT = "expert"
    """Divides the experts."""


@dataclass(frozen=True)
class Place:
    """What a rank holds: its pipeline stage, or one part of it, and its shares in the groups that divide tensors."""

    layers: Sequence[int]
    """Decoder layers of it, numbered in the whole model."""
    experts: range = range(0)
    """Experts of each mixture, numbered in the whole model."""
    first: bool = True
    """Has the embedding and the towers."""
    last: bool = True
    """Has the last norm and the output layer."""
    tensor: tuple[int, int] = (0, 1)
    """Rank and size, as those that follow."""
    expert_tensor: tuple[int, int] = (0, 1)
    expert: tuple[int, int] = (0, 1)
    writes: bool = True
    """Whether this rank writes what is no expert, of all that have equal parts of it."""
    writes_experts: bool = True

    @classmethod
    def whole(cls, n_layers: int, n_experts: int = 0) -> Place:
        """The one rank of an undivided model."""
        return cls(range(n_layers), range(n_experts))

    @classmethod
    def here(cls, layers: range, n_experts: int, *, first: bool, last: bool) -> Place:
        """What this process holds, by Megatron's parallel state.

        Args:
            layers: of the stage, or of a part of it.
            n_experts: of a mixture of the whole model; 0: there is none.
            first: has the embedding and the towers.
            last: has the last norm and the output layer.
        """
        from megatron.core import parallel_state

        state: Any = parallel_state
        expert = state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()
        own = n_experts // expert[1]
        return cls(
            layers,
            range(own * expert[0], own * (expert[0] + 1)),
            first,
            last,
            (state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
            (state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()),
            expert,
            state.get_data_parallel_rank(with_context_parallel=True) == 0,
            state.get_expert_data_parallel_rank() == 0,
        )

    def part(self, group: Group) -> tuple[int, int]:
        """Rank and size in a group."""
        parts: dict[Group, Any] = {
            Group.TENSOR: self.tensor,
            Group.EXPERT_TENSOR: self.expert_tensor,
            Group.EXPERT: self.expert,
        }
        return parts[group]

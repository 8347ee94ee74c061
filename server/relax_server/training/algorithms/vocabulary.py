"""A vocabulary that is divided over several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabularyShard:
    """One rank's tokens of a vocabulary: as many as the others have, in the order of their ranks."""

    rank: int
    size: int
    group: Any
    """The process group of these ranks."""

    def local(self, tokens: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Tokens as columns of this rank's part.

        Args:
            tokens: int64 [n], of the whole vocabulary.
            width: tokens of a part.

        Returns:
            int64 [n], 0 for those of other ranks, and bool [n], whether a token is this rank's.
        """
        column = tokens - self.rank * width
        mine = (column >= 0) & (column < width)
        return column.where(mine, 0), mine

    def sum(self, values: Tensor) -> Tensor:
        """Add up the values of all ranks, in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Take the largest value of all ranks, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def join(self, part: Tensor) -> Tensor:
        """The columns of all ranks: [r, width] to [r, size * width]; without gradient."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, 1)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's columns: the inverse of `join`."""
        return whole.chunk(self.size, 1)[self.rank]

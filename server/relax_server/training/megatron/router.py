"""The router of a mixture of experts, which takes recorded routes in place of its own choice (R3, see `training.routes`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter

if not hasattr(moe_utils, "te_general_gemm"):  # Megatron imports it beside Transformer Engine alone, and looks it up always
    moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


class Replay:
    """Known routes in place of a router's choice; stands in the slot that Megatron keeps for its `RouterReplay`.

    Megatron's own class holds all routers of the process in one global list and a queue for layers that are computed again:
    a second model, a dense layer between, or micro-batches in another order mix them up. This one holds the routes of the
    layer that is being computed, and nothing else.
    """

    def __init__(self) -> None:
        self.routes: torch.Tensor | None = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: Any = None,
        group_topk: Any = None,
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by Megatron in place of `torch.topk`: scores [t, experts] to probabilities and experts, both [t, topk]."""
        own, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.routes is None:
            return own, experts
        experts = torch.where(self.routes < 0, experts, self.routes)
        return scores.gather(1, experts), experts


class ReplayRouter(TopKRouter):
    """Megatron's router, which sends tokens where it is told."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay: Any = Replay()

    @contextlib.contextmanager
    def replaying(self, routes: torch.Tensor | None) -> Iterator[None]:
        """Take these routes inside the block: Megatron's layers hand hidden states alone to their router.

        Args:
            routes: int64 [t, top_k], -1 where the router chooses; None: it chooses everywhere.
        """
        self.router_replay.routes = routes
        try:
            yield
        finally:
            self.router_replay.routes = None

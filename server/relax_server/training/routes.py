"""Rollout routing replay (R3): the trainer sends each token to the experts that the engine chose.

Ma et al., "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv 2510.11370. Tokens whose
route is not known are left to the trainer. The routers that take the routes are in `megatron.router`.
"""

from __future__ import annotations

import numpy as np

from relax_sdk.errors import TrainingError
from relax_sdk.trajectory import Sample, Trajectory, Turn


def _turn_routes(turn: Turn) -> np.ndarray | None:
    if turn.routed_experts is None or turn.routed_shape is None:
        return None
    routes = np.frombuffer(turn.routed_experts, np.int32)
    wanted = len(turn.prompt_ids) + len(turn.response_ids) - 1
    if len(turn.routed_shape) != 3 or turn.routed_shape[0] != wanted or routes.size != int(np.prod(turn.routed_shape)):
        raise TrainingError(f"routed experts {turn.routed_shape} ({routes.size} numbers) do not cover {wanted} tokens")
    return routes.reshape(turn.routed_shape)


def sample_routes(trajectory: Trajectory, sample: Sample) -> np.ndarray | None:
    """Put together the routes of a sample's tokens, each from the first turn that computed it.

    Returns:
        int32 [n, layers, top_k] for the first n tokens of the sample, -1 where no turn says; None where none does at all.

    Raises:
        TrainingError: recorded routes do not cover their turn.
    """
    out: np.ndarray | None = None
    done = 0
    for index in sorted({t for t in sample.turn if t >= 0}):
        routes = _turn_routes(trajectory.turns[index])
        if routes is None:
            continue
        if out is None:
            out = np.full((len(sample.ids), *routes.shape[1:]), -1, np.int32)
        out[done : len(routes)] = routes[done:]
        done = len(routes)
    return out

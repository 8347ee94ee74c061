"""Trajectories as clients are told of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from relax_sdk.trajectory import Trajectory
from relax_server.gateway.wire import plain


def finished(trajectory: Trajectory) -> dict[str, Any]:
    """How an episode ended: its trajectory's id, status, rewards and error."""
    fields = ("status", "reward", "rewards", "error")
    return {"trajectory_id": trajectory.id} | {name: getattr(trajectory, name) for name in fields}


def whole_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """All of a trajectory as JSON; routed experts are left out but for their shape."""
    fields = {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(trajectory) if f.name != "turns"}
    turns = []
    for turn in trajectory.turns:
        row = {f.name: getattr(turn, f.name) for f in dataclasses.fields(turn) if f.name != "routed_experts"}
        row["media"] = [dataclasses.asdict(ref) for ref in turn.media]
        row["weight_versions"] = [dataclasses.asdict(span) for span in turn.weight_versions]
        turns.append(row)
    return plain(fields | {"turns": turns})

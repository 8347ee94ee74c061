"""Trajectories as clients are told of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from relax_sdk.evaluation import Evaluation
from relax_sdk.recorded import RecordedTrajectory
from relax_sdk.trajectory import Trajectory
from relax_server.gateway.wire import as_json, plain


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


def whole_evaluation(evaluation: Evaluation) -> bytes:
    """An evaluation with its trajectories as JSON; where this machine has their media is left out."""
    fields = {f.name: getattr(evaluation, f.name) for f in dataclasses.fields(evaluation) if f.name != "trajectories"}
    kept = [
        dataclasses.replace(t, media_folder=None) if isinstance(t, RecordedTrajectory) else t for t in evaluation.trajectories
    ]
    return as_json(fields | {"trajectories": [whole_trajectory(trajectory) for trajectory in kept]})

"""Trajectories as a rollout service tells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_sdk.config import SamplingParams
from relax_sdk.media import MediaRef
from relax_sdk.recorded import RecordedTrajectory
from relax_sdk.trajectory import Status, Trajectory, Turn, VersionSpan


def read_trajectory(body: Mapping[str, Any]) -> Trajectory:
    """The trajectory in an answer, with all its tokens."""
    return Trajectory(**_fields(body))


def read_recorded(body: Mapping[str, Any]) -> RecordedTrajectory:
    """The same with what a run says of it."""
    return RecordedTrajectory(**_fields(body))


def _fields(body: Mapping[str, Any]) -> dict[str, Any]:
    turns = [
        Turn(
            **{name: value for name, value in turn.items() if name not in ("media", "weight_versions", "sampling")},
            media=[MediaRef(**ref) for ref in turn["media"]],
            weight_versions=[VersionSpan(**span) for span in turn["weight_versions"]],
            sampling=SamplingParams(**turn["sampling"]) if turn.get("sampling") else None,
        )
        for turn in body["turns"]
    ]
    return {**body, "turns": turns, "status": Status(body["status"])}

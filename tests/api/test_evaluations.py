"""An evaluation at a service comes with its trajectories, as one here does."""

from __future__ import annotations

import dataclasses
import math

import msgspec
from relax_server.api.trainings.protocol import Told
from relax_server.api.trajectories import whole_evaluation

from relax_sdk.client.runs import _read_evaluation
from relax_sdk.evaluation import Evaluation
from relax_sdk.media import MediaRef
from relax_sdk.recorded import RecordedTrajectory, Trajectories
from relax_sdk.trajectory import Status, Trajectory, Turn, VersionSpan

SOUND = MediaRef("0" * 64, "audio/wav", 100, duration=1.0, sampling_rate=16_000)


def test_trajectories_come_whole_but_for_routes_and_for_where_their_media_are() -> None:
    turn = Turn([1, 2], [3], [-0.5], [VersionSpan(0, 1, 4)], media=[SOUND], routed_experts=b"routes")
    place = ("run/eval/4/0/0", "e", "0", 0, "run/eval/4/0", 0, 1, 7, Status.COMPLETED)
    played = RecordedTrajectory(
        *place, [turn], [{"role": "user", "content": "?"}], 1.0, split="eval", media_folder="/srv/media"
    )
    evaluation = Evaluation(1.0, float("nan"), 1, trajectories=list[Trajectory]([played]))
    line = msgspec.json.encode(Told(kind="answer", data=msgspec.Raw(whole_evaluation(evaluation))))  # as its process tells it
    told = _read_evaluation(msgspec.json.decode(line, type=Told).data)
    assert math.isnan(told.ci95) and (told.mean_reward, told.n) == (1.0, 1)
    (read,) = told.trajectories
    assert isinstance(told.trajectories, Trajectories) and len(told.trajectories.frame) == 1
    assert read == dataclasses.replace(played, media_folder=None, turns=[dataclasses.replace(turn, routed_experts=None)])
    assert b"/srv/media" not in line

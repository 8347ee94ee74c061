"""Each token is told why it was trained on or not: where it stands, and what became of its group."""

from __future__ import annotations

import numpy as np
import pytest
from relax_server.journal.explain import explain
from relax_server.journal.finding import GroupRow
from relax_server.journal.trained import TrainedGroup, TrainedSample, TrainedTrajectory
from sample_groups import make_group, make_turn

from relax_sdk import Status

GROUP = GroupRow("g", "train", "acked", 3, 4, checkpoint=8)


def episode():
    """Two turns that go on from one another, and one whose history was written anew."""
    (t,) = make_group("g", versions=(3,)).trajectories
    first = make_turn(2, 3, prompt=[1, 2, 3])
    second = make_turn(3, 4, prompt=[1, 2, 3, 10, 11, 7, 8])
    third = make_turn(1, 4, prompt=[9, 9])
    t.turns = [first, second, third]
    return t


def record(*advantages, id="g-0"):
    samples = [TrainedSample(*(np.zeros(len(a), np.float32),) * 2, np.array(a, np.float32)) for a in advantages]
    return TrainedGroup("g", 5, 4, [TrainedTrajectory(id, 0.0, 0.0, samples)])


def told(group=GROUP, trained=None):
    found = explain(episode(), group, trained)
    for each in found.samples:
        assert len(each.why) == len(each.sample.ids)
        answers = [found.reasons[why].startswith("answer of") for why in each.why]
        assert answers == [bool(mask) for mask in each.sample.loss_mask]
    return [[found.reasons[why] for why in each.why] for each in found.samples]


def test_where_each_token_stands():
    first, second = told()
    after = ["not trained: what came after the answer of turn 0, such as its observation"]
    assert first[:3] + first[5:7] == ["not trained: prompt"] * 3 + after * 2
    assert [why.split(":")[0] for why in first[3:5] + first[7:]] == ["answer of turn 0"] * 2 + ["answer of turn 1"] * 3
    assert second[:2] == ["not trained: prompt of turn 2, written anew, so a new sample begins"] * 2


def test_what_training_made_of_each_turn():
    first, second = told(trained=record([0.5, 0.5, 0, 0, 0], [np.nan]))
    assert first[3] == "answer of turn 0: trained in step 5 with advantage +0.5"
    assert first[7] == "answer of turn 1: trained in step 5 with advantage +0, so that the reward moves nothing"
    assert second[2] == "answer of turn 2: trained in step 5"
    assert told(trained=record([0.5], [1.0]))[0][3] == "answer of turn 0: trained in step 5"
    assert told(trained=record(id="other"))[0][3] == "answer of turn 0: not trained: the episode was left out of step 5"


@pytest.mark.parametrize(
    ("split", "state", "expected"),
    [
        ("eval", "recorded", "not trained: a held-out evaluation"),
        ("warmup", "recorded", "an example of the format, learnt in the warm-up"),
        ("train", "stale", "not trained: the group was too old (its oldest weights are of version 3)"),
        ("train", "failed", "not trained: the group was set aside (NaN)"),
        ("train", "ready", "not trained yet: the group waits for the trainer"),
        ("train", "leased", "not trained yet: the group is with the trainer"),
        ("train", "acked", "trained, and inside checkpoint 8; what the step made of it was not recorded"),
    ],
)
def test_what_became_of_the_group(split, state, expected):
    group = GroupRow("g", split, state, 3, 4, checkpoint=8 if state == "acked" else None, failure="NaN")
    assert told(group)[0][3] == f"answer of turn 0: {expected}"


def test_an_episode_that_failed_is_not_trained_on():
    failed = episode()
    failed.status, failed.info = Status.TIMED_OUT, {"failure": "EpisodeTimeout"}
    found = explain(failed, GROUP, None)
    assert "answer of turn 0: not trained: the episode failed (EpisodeTimeout)" in found.reasons

"""Recorded episodes and groups of a run are found by what they are, through `Run`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from relax_server.journal import open_journal
from relax_server.journal.trained import TrainedGroup, TrainedSample, TrainedTrajectory
from sample_groups import make_group

from relax_sdk import ConfigError, Run, RunConfig
from relax_sdk.recorded import RecordedTrajectory


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "tone"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(RunConfig("tone-v0").to_dict()))
    journal = open_journal(folder / "journal.db")
    for index in range(12):
        group = make_group(f"tone/train/{index}", versions=(0, 0, 1, None), task_index=index, tokens=2 + index % 3)
        for t in group.trajectories:
            t.id = f"{group.id}/{t.group_index}"
        group.trajectories[0].messages.append({"role": "assistant", "content": f"Answer {index}"})
        journal.commit(group, "tone")
    journal.commit(make_group("tone/eval@2/0", versions=(2,)), "tone", "eval")
    sample = TrainedSample(*(np.zeros(2, np.float32) for _ in range(3)))
    members = [TrainedTrajectory(f"tone/train/0/{i}", i - 0.5, 0.01, [sample]) for i in range(2)]
    journal.record_trained("tone", [TrainedGroup("tone/train/0", 5, 4, members)])
    journal.close()
    return Run.load(folder)


def ids(found):
    return [t.id for t in found]


def test_the_worst_and_the_best_come_first_with_what_is_known_of_them(run):
    worst = run.trajectories(split="train", sort="worst", limit=3)
    assert [t.reward for t in worst] == [0.0, 0.0, 0.0] and len(worst) == 3
    assert run.trajectories(sort="best", limit=1)[0].reward == 2.0
    last = run.trajectories(split="train", sort="best", limit=None)[-12:]
    assert {t.status for t in last} == {"failed"}, "what has no reward is neither good nor bad"
    (first,) = run.trajectories(step=5, reward=1.0)
    assert isinstance(first, RecordedTrajectory) and first.turns[0].response_ids == [10, 11]
    assert (first.id, first.split, first.step, first.advantage, first.staleness) == ("tone/train/0/1", "train", 5, 0.5, 4)
    assert first.media_folder == str(run.folder / "media")


def test_filters_go_together(run):
    assert ids(run.trajectories(text="answer 11")) == ["tone/train/11/0"]
    assert ids(run.trajectories(split="eval")) == ["tone/eval@2/0-0"]
    assert len(run.trajectories(split="train", limit=None)) == 48
    failed = run.trajectories(status="failed", task=4)
    assert ids(failed) == ["tone/train/4/3"]
    middle = run.trajectories(status=["failed", "completed"], reward=(1.0, 2.0), task=4, sort="oldest")
    assert ids(middle) == ["tone/train/4/1", "tone/train/4/2"]
    assert len(run.trajectories(reward=(None, 0.0), split="train", limit=None)) == 12


def test_order_holds_beyond_what_is_read_at_once(run, monkeypatch):
    from relax_server.roles import looking

    monkeypatch.setattr(looking, "AT_ONCE", 5)
    found = run.trajectories(split="train", sort="longest", limit=None)
    lengths = [t.n_response_tokens for t in found]
    assert lengths == sorted(lengths, reverse=True) and len(set(ids(found))) == 48


@pytest.mark.parametrize("asked", ["train/1", "tone/train/1", "train/1/2"])
def test_a_group_is_found_by_its_id_or_a_member(run, asked):
    group = run.group(asked)
    assert group.id == "tone/train/1" and [t.group_index for t in group.trajectories] == [0, 1, 2, 3]
    assert all(isinstance(t, RecordedTrajectory) for t in group.trajectories)


def test_a_group_is_found_by_the_number_of_a_member(run):
    member = run.group("train/1").trajectories[2]
    assert run.group(str(member.seq)).id == run.group(f"#{member.seq}").id == "tone/train/1"


def test_what_is_not_there_is_told(run, tmp_path):
    with pytest.raises(ConfigError, match="no group 'train/77'; the nearest of 13: tone/train/7"):
        run.group("train/77")
    with pytest.raises(ConfigError, match="13 groups of tone begin with ''"):
        run.group("")
    for wrong in (dict(sort="biggest"), dict(status="lost"), dict(limit=0)):
        with pytest.raises(ConfigError, match="allowed"):
            run.trajectories(**wrong)
    (run.folder / "journal.db").unlink()
    with pytest.raises(ConfigError, match="has no journal"):
        run.trajectories()

"""What every implementation of `Journal` promises of how trajectories are found, and of what training made of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from journal_calls import RUN, Open
from relax_server.journal.base import Journal
from relax_server.journal.finding import GroupRow, TrajectoryQuery
from relax_server.journal.trained import TrainedGroup, TrainedSample, TrainedTrajectory
from sample_groups import make_group

from relax_sdk.errors import ConfigError, JournalError
from relax_sdk.probing import MediaRef
from relax_sdk.trajectory import Group, Status

SOUND = MediaRef("a" * 64, "audio/wav", 32044, duration=1.0, sampling_rate=16_000)
PICTURE = MediaRef("b" * 64, "image/png", 900, width=64, height=32)


def group(id: str, rewards: tuple[float, ...], *said: str, media: tuple[MediaRef, ...] = ()) -> Group:
    """A group whose members have these rewards and say these texts, and whose prompts hold these media."""
    made = make_group(id, versions=tuple(range(len(rewards))))
    for number, trajectory in enumerate(made.trajectories):
        trajectory.reward = rewards[number]
        parts = [{"type": "text", "text": text} for text in said[number % len(said) : number % len(said) + 1]] if said else []
        trajectory.messages = [{"role": "user", "content": parts}]
        trajectory.turns = [replace(turn, media=list(media)) for turn in trajectory.turns]
    return made


def ids(journal: Journal, **wanted: object) -> list[str]:
    return [row.id for row in journal.find(RUN, TrajectoryQuery(**wanted))]  # type: ignore[arg-type]


def test_trajectories_are_found_by_what_is_known_of_them(journal: Journal) -> None:
    journal.commit(group("g", (0.0, 1.0), "Is it 100% blue?", "it's_red"), RUN)
    journal.commit(group("h", (0.5, -1.0), "BLUE again"), RUN, split="eval")
    journal.commit(group("other", (9.0, 9.0), "blue"), "run-2")
    assert ids(journal) == ["h-1", "h-0", "g-1", "g-0"]
    assert ids(journal, sort="oldest", limit=2, offset=1) == ["g-1", "h-0"]
    assert ids(journal, sort="best") == ["g-1", "h-0", "g-0", "h-1"]
    assert ids(journal, sort="worst", split="train") == ["g-0", "g-1"]
    assert ids(journal, reward_min=0.0, reward_max=0.5) == ["h-0", "g-0"]
    assert ids(journal, text="blue") == ["h-1", "h-0", "g-0"]
    assert ids(journal, text="100%") == ["g-0"] and ids(journal, text="s_r") == ["g-1"] and ids(journal, text="b_ue") == []
    assert ids(journal, group_id="h", statuses=("failed", "completed")) == ["h-1", "h-0"]
    after = journal.find(RUN, TrajectoryQuery(sort="oldest"))[1].seq
    assert ids(journal, after=after) == ["h-1", "h-0"]
    assert journal.count(RUN, TrajectoryQuery(text="blue", limit=1)) == 3
    assert journal.runs() == [RUN, "run-2"]


def test_a_row_says_what_lists_show(journal: Journal) -> None:
    made = group("g", (1.0, 0.0), "hello", media=(PICTURE, SOUND))
    made.trajectories[1].status, made.trajectories[1].error = Status.FAILED, "boom " * 100
    journal.commit(made, RUN)
    good, bad = journal.find(RUN, TrajectoryQuery(sort="oldest"))
    assert (good.group_index, good.turns, good.attempts, good.error) == (0, len(made.trajectories[0].turns), 1, None)
    assert good.media == ("audio", "image") and good.step is good.advantage is good.gap is good.staleness is None
    assert bad.error == ("boom " * 100)[:300]
    assert journal.by_seq(bad.seq) == made.trajectories[1]
    with pytest.raises(JournalError, match="no trajectory 999"):
        journal.by_seq(999)


def test_a_query_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="sort='nicest'; allowed: newest"):
        TrajectoryQuery(sort="nicest")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="limit=0"):
        TrajectoryQuery(limit=0)


def test_each_item_is_listed_once_a_run_with_its_first_showing(journal: Journal) -> None:
    journal.commit(group("g", (1.0, 0.0), media=(SOUND,)), RUN)
    journal.commit(group("h", (1.0, 0.0), media=(PICTURE, SOUND)), RUN)
    journal.commit(group("other", (1.0,), media=(SOUND,)), "run-2")
    rows = {row.id: row.seq for row in journal.find(RUN, TrajectoryQuery())}
    sound, picture = journal.media(RUN)
    assert (sound.ref, sound.trajectory_seq, picture.ref, picture.trajectory_seq) == (SOUND, rows["g-0"], PICTURE, rows["h-0"])
    assert picture.kind == "image"
    assert journal.media(RUN, after=sound.seq) == [picture] and journal.media(RUN, limit=1) == [sound]
    assert [row.ref for row in journal.media("run-2")] == [SOUND]


def record(step: int, logprob: float) -> TrainedGroup:
    def sample(n: int) -> TrainedSample:
        entropy = np.full(n, np.nan, np.float32)
        return TrainedSample(np.full(n, logprob, np.float32), entropy, np.arange(n, dtype=np.float32))

    members = [TrainedTrajectory("g-0", 0.5, 1e-4, [sample(3), sample(1)]), TrainedTrajectory("g-1", -0.5, float("nan"), [])]
    return TrainedGroup("g", step, 4, members)


def test_what_training_made_of_a_group_is_kept_and_shown_in_lists(journal: Journal, open_again: Open) -> None:
    journal.commit(group("g", (1.0, 0.0)), RUN)
    assert journal.trained("g") is None
    journal.record_trained(RUN, [record(4, -1.0), replace(record(4, 0.0), group_id="unknown")])
    journal.record_trained(RUN, [record(5, -2.0)])  # the trainer went back to a checkpoint, and came here again
    kept = open_again().trained("g")
    assert kept is not None and (kept.step, kept.version, [t.id for t in kept.trajectories]) == (5, 4, ["g-0", "g-1"])
    first, second = kept.trajectories[0].samples
    assert first.logprobs.dtype == np.float32 and first.logprobs.tolist() == [-2.0] * 3 and second.advantages.tolist() == [0.0]
    assert np.isnan(first.entropy).all()
    good, bad = journal.find(RUN, TrajectoryQuery(sort="oldest", step=5))
    assert (good.step, good.advantage, good.gap, good.staleness) == (5, 0.5, pytest.approx(1e-4), 4)
    assert (bad.advantage, bad.gap, bad.staleness) == (-0.5, None, 3)
    assert ids(journal, sort="stalest") == ["g-0", "g-1"]


def test_what_became_of_a_group(journal: Journal) -> None:
    journal.commit(group("g", (0.0, 1.0)), RUN)
    journal.commit(group("h", (0.0,)), RUN, split="eval")
    assert journal.group_row("g") == GroupRow("g", "train", "ready", 0, 1)
    assert journal.group_row("h") == GroupRow("h", "eval", "recorded", 0, 0)
    journal.lease(1, RUN, "me", 1, 9, 60.0)
    journal.ack(["g"], RUN, "me", 4)
    assert journal.group_row("g") == GroupRow("g", "train", "acked", 0, 1, checkpoint=4)
    with pytest.raises(JournalError, match="no group 'x'"):
        journal.group_row("x")


def test_why_a_group_was_set_aside(journal: Journal) -> None:
    journal.commit(group("g", (0.0, 1.0)), RUN)
    journal.lease(1, RUN, "me", 1, 9, 60.0)
    journal.set_aside("g", RUN, "me", "its loss is NaN")
    found = journal.group_row("g")
    assert (found.state, found.failure) == ("failed", "its loss is NaN")

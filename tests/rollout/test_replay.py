"""Recorded episodes played again: what is the same is said to be, and each kind of difference is found where it is."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from relax_server.roles.layout import RunLayout
from relax_server.roles.looking import read_episode
from relax_server.rollout.replay import compare, play_again, sample_again
from relax_server.rollout.task import EpisodeTask

import relax_sdk as relax
from relax_sdk import ConfigError, EnvSpec, Image, RunConfig, RunError
from relax_sdk.replay import EpisodeReplay


class Steps(relax.Env):
    """Three turns: a drawn number and a picture first, then numbers that go on from it; more reward for later turns."""

    modalities = {"image"}
    noise = staticmethod(lambda turn: 0)
    """Added to the number that is shown in a turn."""
    turns = 3

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn, self.number = 0, int(self.np_random.integers(1000))
        picture = Image.from_array(np.full((28, 28, 3), self.number % 255, np.uint8))
        return [picture, f"{options['task']['index']}: {self.number + self.noise(0)}"], {}

    def step(self, action):
        self.turn += 1
        return f"{self.number + self.turn + self.noise(self.turn)}", 0.5 * self.turn, self.turn >= self.turns, False, {}

    @relax.reward(weight=0.1)
    def length(self, trajectory):
        return float(len(trajectory.turns))


class Replays:
    """An episode that was recorded, and ways to play it again."""

    def __init__(self, made, recorded, row):
        self.made, self.recorded, self.row = made, recorded, row
        self.processor = made.engine.processor

    async def played(self, env):
        r, config = self.recorded, self.made.worker.config
        place = (r.group_id, r.group_index, r.group_size)
        task = EpisodeTask("train", r.task_index, self.row, *place, r.seed, config.seed, config.sampling)
        return await play_again(EnvSpec("test-v0", env), config, self.processor, None, r, task)

    async def differences(self, env=Steps) -> list[str]:
        now, groups = await self.played(env)
        return [f"{d.what}, {d.where}" for d in compare(self.recorded, now, self.processor, groups)]


@pytest.fixture
async def replays(bench):
    made = bench(Steps, lambda request: [random.Random(request.sampling.sampling_seed).randrange(40, 90) for _ in range(5)])
    group = (await made.group(5, {"index": 5})).group
    await made.worker.commit(group, "train")
    return Replays(made, group.trajectories[0], {"index": 5})


async def test_an_episode_of_an_unchanged_environment_is_the_same(replays):
    assert await replays.differences() == []
    assert len(list(replays.made.store.root.rglob("*.*"))) == 1  # nothing was added to the run's media


async def test_a_failed_replay_is_the_difference(replays):
    def broken(turn):
        raise ValueError("gone")

    assert (await replays.differences(type("Broken", (Steps,), {"noise": staticmethod(broken)})))[-1] == "end, the episode"


async def test_an_episode_that_failed_before_its_first_answer_is_played_again(replays):
    def reset(self, *, seed=None, options=None):
        raise OSError("c4.wav: Input/output error")

    broken = type("Broken", (Steps,), {"reset": reset})
    replays.recorded, _ = await replays.played(broken)
    assert replays.recorded.turns == [] and replays.recorded.failure is not None
    assert await replays.differences(broken) == [], "it fails as it did"
    assert (await replays.differences())[-1] == "end, the episode", "the environment was mended"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"noise": staticmethod(lambda turn: int(turn == 0))}, ["observation, turn 0, message 0 (user)"]),
        ({"noise": staticmethod(lambda turn: int(turn == 2))}, ["observation, turn 2, message 4 (user)"]),
        ({"turns": 2}, ["action, turn 2, message 5 (assistant)", "component, env", "component, length", "end, the episode"]),
        ({"turns": 4}, ["end, the episode"]),
        ({"length": relax.reward(weight=0.1)(lambda self, trajectory: 0.0)}, ["component, length"]),
    ],
)
async def test_a_changed_environment_differs_where_it_was_changed(replays, changes, expected):
    found = await replays.differences(type("Changed", (Steps,), changes))
    assert found == expected


async def test_step_rewards_are_compared_turn_by_turn(replays):
    replays.recorded.turns[1].reward += 0.25
    assert await replays.differences() == ["reward, turn 1"]


async def test_the_same_engine_gives_the_same_tokens_and_another_does_not(replays):
    made, recorded = replays.made, replays.recorded
    again = await sample_again(made.engine, recorded, replays.processor, made.store, 10.0)
    assert again == (15, None, [])
    made.engine.script = lambda request: [*recorded.turns[1].response_ids[:3], 91, 92]
    recorded.turns[0].sampling = dataclasses.replace(recorded.turns[0].sampling, sampling_seed=None)
    equal, difference, notes = await sample_again(made.engine, recorded, replays.processor, made.store, 10.0)
    assert equal == 3 and difference.where == "turn 1, position 3" and "91" in difference.replayed
    assert notes == ["turn 0: the engine drew its tokens without a recorded seed, so they are not compared"]


async def test_media_that_are_missing_are_named(replays):
    made, ref = replays.made, replays.recorded.turns[0].media[0]
    made.store.path(ref).unlink()
    with pytest.raises(RunError, match=f"the image {ref.sha256} of its record is missing"):
        await sample_again(made.engine, replays.recorded, replays.processor, made.store, 10.0)


async def test_an_episode_is_found_by_its_id_or_its_beginning(bench, tmp_path):
    made = bench(Steps, "A", group_size=12)
    for index in (5, 7):
        await made.worker.commit((await made.group(index, {"index": index})).group, "train")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "journal.db").symlink_to(tmp_path / "journal-0.db")
    config, layout = RunConfig("test-v0"), RunLayout(folder)
    assert read_episode(config, layout, "train/5/1").id == "run/train/5/1"
    trajectory = read_episode(config, layout, "run/train/5/11")
    assert (trajectory.group_index, trajectory.split) == (11, "train")
    assert (
        read_episode(config, layout, f"#{trajectory.seq}").id
        == read_episode(config, layout, str(trajectory.seq)).id
        == trajectory.id
    )
    with pytest.raises(ConfigError, match=r"no episode '#99'; the nearest of 24"):
        read_episode(config, layout, "#99")
    with pytest.raises(ConfigError, match=r"12 episodes of run begin with 'train/7': run/train/7/0, .*…"):
        read_episode(config, layout, "train/7")
    with pytest.raises(ConfigError, match=r"no episode 'train/5/12'; the nearest of 24: run/train/5/"):
        read_episode(config, layout, "train/5/12")
    with pytest.raises(ConfigError, match="has no journal"):
        read_episode(config, RunLayout(tmp_path), "train/5/1")


def test_what_is_told():
    told = str(EpisodeReplay("run/train/1/0", "tone-v0", 1, 9, 2, (), ("a note",), 12))
    assert told.splitlines() == [
        "run/train/1/0: tone-v0, task 1, seed 9, 2 turns",
        "the same: observations, actions, rewards, 12 sampled tokens",
        "note: a note",
    ]

"""Recorded episodes are scored by today's rewards, without a model, and what moved is told."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from decoding_endpoint import DecodingEndpoint
from recorded_run import Bells, bench, processor, recorded_run  # noqa: F401
from relax_envs.tone import ToneEnv
from sdk.fake_judge import fake_judge
from typer.testing import CliRunner

import relax_sdk as relax
from relax_sdk import ConfigError, TrajectoryFilter, cli, replay_episode, rescore
from relax_sdk.rescoring import ScoreChange, summarise


def by_name(done):
    return {c.name: (c.before, c.now, c.changed) for c in done.components}


async def scored(run, env, **options):
    return rescore(run.folder, env=env, progress=False, **options)


async def test_unchanged_rewards_are_the_same(recorded_run):  # noqa: F811
    done = await scored(await recorded_run(), Bells)
    assert (done.n, done.changed, done.movers, done.skipped, done.notes) == (9, 0, (), {}, ())
    assert all(before == pytest.approx(now) and changed == 0 for before, now, changed in by_name(done).values())


async def test_other_rewards_move_what_they_score(recorded_run):  # noqa: F811
    class Changed(Bells):
        right = "B"  # a step reward

        @relax.reward(weight=-0.1)  # another weight
        def length(self, trajectory):
            return super().length(trajectory)

        @relax.reward
        def polite(self, trajectory):  # a new component
            return 0.0

    run = await recorded_run(evals=0)
    done = await scored(run, Changed, movers=2)
    found = by_name(done)
    # of the four answers of each group, A and B change places, and the bell and CC have longer answers
    assert found["reward"] == (pytest.approx(-0.8125), pytest.approx((0 + 1 - 0.1 - 0.75) / 4), 8)
    assert found["env"] == (pytest.approx(0.5625), pytest.approx(0.3125), 6)
    assert found["length"][2] == 0 and found["polite"] == (None, 0.0, 8)
    assert [mover.before for mover in done.movers] == [-3.75, -3.75]
    assert done.movers[0].components_now["bells"] == 2.0  # rewards see what the tools did in the replay
    assert (await scored(run, Changed, wanted=TrajectoryFilter(reward=1.0))).n == 2


async def test_group_rewards_see_the_whole_group(recorded_run):  # noqa: F811
    def best(trajectories):
        assert [t.group_index for t in trajectories] == [0, 1, 2, 3]
        return [float(t.reward == max(other.reward for other in trajectories)) for t in trajectories]

    run = await recorded_run(evals=0)
    done = await scored(run, type("Grouped", (Bells,), {"rubric": relax.Rubric(group_functions=[best])}))
    assert by_name(done)["best"] == (None, 0.25, 8) and done.changed == 2
    alone = TrajectoryFilter(reward=(None, -3.0))
    assert by_name(
        await scored(run, type("Two", (Bells,), {"rubric": relax.Rubric(group_functions=[best])}), wanted=alone)
    ) == (by_name(await scored(run, Bells, wanted=alone)) | {"best": (None, 0.0, 2)})


async def test_what_fails_or_is_shown_otherwise_is_told(recorded_run):  # noqa: F811
    class Broken(Bells):
        def step(self, action):
            if action.text == "B":
                raise ValueError("no B today")
            return super().step(action)

    class Other(Bells):
        def reset(self, *, seed=None, options=None):
            observation, info = super().reset(seed=seed, options=options)
            return [observation[0], "which letter?"], info

    run = await recorded_run(evals=0)
    done = await scored(run, Broken)
    assert done.n == 6 and done.skipped == {"played again they fail with EnvError": 2}
    assert len(done.notes) == 1 and "no B today" in done.notes[0]
    done = await scored(run, Other)
    assert (done.n, done.changed) == (8, 0) and done.notes[0].startswith("8 episodes were shown something else")
    with pytest.raises(ConfigError, match="no episode to score again"):
        await scored(run, Bells, wanted=TrajectoryFilter(reward=99.0))


async def test_the_command_writes_what_moved(recorded_run, tmp_path, monkeypatch):  # noqa: F811
    run = await recorded_run(evals=1)
    relax.register("bells-b-v0", type("BellsB", (Bells,), {"right": "B"}))
    cli.add_commands()
    options = ["--split", "eval", "--env", "bells-b-v0", "--write", str(tmp_path / "moved.json")]
    done = CliRunner().invoke(cli.app, ["replay", str(run.folder), *options])
    assert done.exit_code == 0 and "run: 1 episodes scored again, the reward of 1 moved" in done.output, done.output
    written = json.loads((tmp_path / "moved.json").read_text())
    assert written["movers"][0]["id"] == "run/eval/4/0/0" and written["components"][0]["name"] == "reward"
    for wrong in (["--model", "run"], ["--episode", "x", "--split", "eval"]):
        assert isinstance(CliRunner().invoke(cli.app, ["replay", str(run.folder), *wrong]).exception, ConfigError)


def test_what_is_told():
    one = ScoreChange("r/train/1/0", 1.0, 0.25, {"env": 1.0}, {"env": 1.0})
    two = ScoreChange("r/train/1/1", 0.0, 0.5, {"env": 0.0, "old": 1.0}, {"env": 0.5}, same_observations=False)
    assert str(summarise("r", [two, one], 5, {"failed: ValueError": 3})).splitlines() == [
        "r: 2 episodes scored again, the reward of 2 moved",
        "                            before       now   changed",
        "reward                       0.500     0.375         2",
        "env                          0.500     0.750         1",
        "old                          1.000         –         1",
        "moved furthest:",
        "  r/train/1/0: 1.000 → 0.250 (the components are the same: another weight)",
        "  r/train/1/1: 0.000 → 0.500 (env 0.000 → 0.500, old 1.000 → –)",
        "not scored again: 3 (failed: ValueError)",
        "note: 1 episode was shown something else than was recorded: answers given there are to other questions",
    ]


async def test_judges_are_asked_again(recorded_run):  # noqa: F811
    run = await recorded_run(evals=0)
    async with fake_judge("3", "9") as fake:  # the first episode gets another score than the others
        judged = relax.Rubric([relax.Judge(fake.url, "judge-model", backoff=0.0)])
        env = type("Judged", (Bells,), {"rubric": judged})
        wanted = TrajectoryFilter(task=0, sort="oldest", limit=None)
        done = await asyncio.to_thread(rescore, run.folder, wanted=wanted, env=env, progress=False)
    assert len(fake.requests) == done.n == 4 and done.changed == 4
    assert by_name(done)["judge"] == (None, pytest.approx((0.3 + 3 * 0.9) / 4), 4)
    questions = [request["messages"][-1]["content"] for request in fake.requests]
    assert all("letter?" in question for question in questions), "judges see the episode that was played again"


class Louder(ToneEnv):
    """The same tones, for twice the reward."""

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, 2 * float(reward), *rest


class Silent(ToneEnv):
    """Another sound than was played."""

    def reset(self, *, seed=None, options=None):
        (_, question), info = super().reset(seed=seed, options=options)  # type: ignore[misc]  # the observation is a pair here
        return [relax.Audio.from_array(np.zeros(16_000, np.float32)), question], info


def test_an_evaluation_behind_a_url_is_played_again_from_its_messages(tmp_path):
    endpoint = DecodingEndpoint()
    try:
        relax.evaluate("tone-v0", relax.Endpoint(endpoint.url, "decoder", ""), limit=4, out=tmp_path / "e", progress=False)
    finally:
        endpoint.close()
    again = rescore(tmp_path / "e", progress=False)
    assert (again.n, again.changed, again.skipped, again.notes) == (4, 0, {}, ())
    assert by_name(rescore(tmp_path / "e", env=Louder, progress=False))["reward"] == (1.0, 2.0, 4)
    assert rescore(tmp_path / "e", env=Silent, progress=False).notes[0].startswith("4 episodes were shown something else")
    found = replay_episode(tmp_path / "e", "eval/0/2/0", progress=False)
    assert found.same and found.turns == 1 and "tells no tokens" in found.notes[0]
    other = replay_episode(tmp_path / "e", "eval/0/2/0", env=Louder, progress=False)
    assert {difference.what for difference in other.differences} == {"reward", "component"}
    with pytest.raises(ConfigError, match="behind a URL that tells no tokens"):
        replay_episode(tmp_path / "e", "eval/0/2/0", model="run", progress=False)

"""Recorded episodes are scored by today's rewards, without a model, and what moved is told."""

from __future__ import annotations

import json

import pytest
from recorded_run import Bells, bench, processor, recorded_run  # noqa: F401
from typer.testing import CliRunner

import relax_sdk as relax
from relax_sdk import ConfigError, TrajectoryFilter, cli, rescore
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

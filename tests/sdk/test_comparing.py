"""Runs beside one another: what was set otherwise, what came of it, and their curves."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from relax_sdk import ConfigError, RolloutConfig, Run, RunConfig, compare

CONFIG = RunConfig("tone-v0", seed=1)


def make_run(folder, rewards, config=CONFIG, **more):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    rows = [
        {
            "step": i + 1,
            "time": 100.0 + 30 * i,
            "reward": reward,
            "seconds": {"train": 2.0 * reward},
            "samples": [{"asked": "x"}],
        }
        for i, reward in enumerate(rewards)
    ]
    rows[-1] |= more
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def both(tmp_path):
    other = dataclasses.replace(CONFIG, seed=2, rollout=RolloutConfig(group_size=3))
    a = make_run(tmp_path / "a", [0.0] * 5 + [0.5] * 10, eval_reward=0.25, eval_components={"env": 0.2})
    b = make_run(tmp_path / "b", [1.0] * 15, other, loss=float("nan"))
    return compare(a, Run.load(b))


def test_each_metric_stands_with_the_mean_of_its_last_steps(both):
    metrics = both.metrics
    assert list(metrics.columns) == ["a", "b", "difference"]
    assert list(metrics.loc["reward"]) == [0.5, 1.0, 0.5]
    assert list(metrics.loc["seconds/train"]) == [1.0, 2.0, 1.0]
    assert list(metrics.loc["minutes"]) == [7.0, 7.0, 0.0] and list(metrics.loc["steps"]) == [15, 15, 0]
    assert metrics.loc["eval_components/env", "a"] == 0.2 and math.isnan(metrics.loc["eval_reward", "b"])
    assert {"time", "step", "loss"}.isdisjoint(metrics.index)


def test_only_settings_that_differ_are_listed(both):
    settings = both.settings
    assert set(settings.index) == {"seed", "rollout.group_size"}
    assert list(settings.loc["rollout.group_size"]) == [str(CONFIG.rollout.group_size), "3"]


def test_it_is_shown_with_its_curves(both, tmp_path):
    figure = both.plot(tmp_path / "both.png")
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].get_lines()}
    assert lines["b"] == [1.0] * 15 and lines["a"][-1] == 0.5 and (tmp_path / "both.png").stat().st_size > 5000
    html = both._repr_html_()
    assert "rollout.group_size" in html and "data:image/png;base64," in html and "difference" in html
    assert "eval_reward" in str(both) and "seconds/train" not in str(both)


def test_runs_of_one_name_are_told_apart_and_a_run_without_steps_is_empty(tmp_path):
    a, b = make_run(tmp_path / "x/tone", [0.1]), make_run(tmp_path / "y/tone", [0.2])
    (b / "metrics.jsonl").unlink()
    found = compare(a, b)
    assert list(found.runs) == [str(a), str(b)] and math.isnan(found.metrics.loc["reward", str(b)])
    assert "no setting differs" in str(found)


def test_one_run_is_not_compared(tmp_path):
    a = make_run(tmp_path / "a", [0.1])
    for runs in ((), (a,), (a, Run.load(a))):
        with pytest.raises(ConfigError, match="two or more different runs"):
            compare(*runs)

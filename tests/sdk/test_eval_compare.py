"""Two evaluations side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relax_sdk.cli import app
from relax_sdk.errors import ConfigError
from relax_sdk.evals.compare import compare_evaluations
from relax_sdk.evals.report import EvalEpisode, EvalReport


def report(name: str, rewards: dict[int, list[float | None]], env: str = "e-v0", seed: int = 0) -> EvalReport:
    """An evaluation with these rewards by task and sample; None: the episode failed."""
    episodes = [
        EvalEpisode(
            f"{name}/eval/0/{task}/{sample}",
            task,
            sample,
            "completed" if reward is not None else "failed",
            reward or 0.0,
            {} if reward is None else {"env": reward, "form": 1.0},
            None if reward is not None else "EnvError",
            tags=("odd" if task % 2 else "even",),
        )
        for task, samples in rewards.items()
        for sample, reward in enumerate(samples)
    ]
    return EvalReport(name, env, "m", "eval", {"seed": seed}, len(rewards), 1.0, "tag", episodes)


def test_flips_go_both_ways_and_differences_are_by_component_and_tag():
    a = report("a", {0: [1.0], 1: [0.0], 2: [0.0], 3: [0.0]})
    b = report("b", {0: [0.0], 1: [1.0], 2: [0.0], 3: [1.0]})
    found = compare_evaluations(a, b)
    assert [f.task for f in found.gained] == [1, 3] and [f.task for f in found.lost] == [0]
    assert found.lost[0].ids == ("a/eval/0/0/0", "b/eval/0/0/0") and (found.lost[0].before, found.lost[0].after) == (1, 0)
    assert found.reward.mean == 0.25 and not found.reward.significant
    assert found.components["form"].mean == 0 and found.by_tag["odd"].mean == 1 and found.by_tag["even"].mean == -0.5
    text = found.to_markdown()
    assert "## Solved by b alone: 2" in text and "## Solved by a alone: 1" in text


def test_a_small_gain_on_each_task_is_seen():
    hard = [n / 40 for n in range(40)]
    a = report("a", {n: [r] for n, r in enumerate(hard)})
    b = report("b", {n: [r + 0.02] for n, r in enumerate(hard)})
    found = compare_evaluations(a, b)
    assert found.reward.low > 0.019 and "better" in found.to_markdown()
    assert compare_evaluations(b, a).reward.high < -0.019


def test_tasks_that_one_lacks_or_that_failed_are_left_out():
    a = report("a", {0: [1.0], 1: [1.0, None], 2: [None], 3: [1.0]}, seed=1)
    b = report("b", {0: [1.0], 1: [0.0, 0.0], 2: [1.0]})
    found = compare_evaluations(a, b)
    assert (found.tasks, found.left_out) == (2, 2) and found.reward.mean == -0.5
    assert found.notes == ["seed is 1 in a and 0 in b"]


def test_what_is_not_alike_is_refused():
    with pytest.raises(ConfigError, match="env 'e-v0' and b has 'other-v0'"):
        compare_evaluations(report("a", {0: [1.0]}), report("b", {0: [1.0]}, env="other-v0"))
    with pytest.raises(ConfigError, match="no task in common"):
        compare_evaluations(report("a", {0: [1.0]}), report("b", {1: [1.0]}))


def test_the_command(tmp_path: Path):
    for name, rewards in (("a", {0: [0.0], 1: [0.5]}), ("b", {0: [1.0], 1: [0.5]})):
        (tmp_path / name).mkdir()
        report(name, {**rewards}).save(tmp_path / name)
    out = tmp_path / "d.json"
    done = CliRunner().invoke(app, ["eval", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json", str(out)])
    assert done.exit_code == 0 and "# b less a: e-v0 [eval]" in done.output, done.output
    assert json.loads(out.read_text())["gained"][0]["task"] == 0
    done = CliRunner().invoke(app, ["eval", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--success", "0.5"])
    assert "Solved by a alone: 0" in done.output and "Solved by b alone: 1" in done.output
    done = CliRunner().invoke(app, ["eval", "compare", str(tmp_path), str(tmp_path / "b")])
    assert isinstance(done.exception, ConfigError) and "holds no evaluation" in str(done.exception)

"""The report of an evaluation, and the folder that goes on only with the same one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import relax_sdk as relax
from relax_sdk.config import RunConfig, SamplingParams
from relax_sdk.errors import ConfigError
from relax_sdk.evals.plan import EvalPlan, beside, default_folder, keep_plan
from relax_sdk.evals.report import EvalEpisode, EvalReport


def episode(task: int, sample: int = 0, reward: float = 0.0, failure: str | None = None, tag: str = "") -> EvalEpisode:
    tags = (tag,) if tag else ()
    error = "it broke | here\nand there" if failure else None
    rewards = {} if failure else {"env": reward, "short": 0.5}
    return EvalEpisode(f"n/eval/0/{task}/{sample}", task, sample, "completed", reward, rewards, failure, error, tags)


def report(episodes: list[EvalEpisode], of: int, by: str | None = None) -> EvalReport:
    return EvalReport("n", "e-v0", "m", "eval", {"seed": 0}, of, 1.0, by, episodes)


def test_failed_episodes_are_counted_by_cause_and_are_in_no_mean():
    found = report([episode(0, 0, 1.0), episode(1, 0, 0.0), episode(2, 0, 0.0, "EngineUnavailable")], 3)
    scores = found.scores
    assert (scores.reward.mean, scores.reward.n, scores.tasks) == (0.5, 2, 2)
    assert scores.pass_at[1].mean == 0.5 and scores.components["short"].mean == 0.5
    assert scores.failures == {"EngineUnavailable": 1}
    text = found.to_markdown()
    assert "1 failed and count nowhere" in text and "it broke \\| here and there" in text


def test_pass_at_k_is_over_tasks_with_as_many_samples():
    tries = [episode(0, s, float(s == 0)) for s in range(4)] + [episode(1, s, 0.0) for s in range(3)]
    scores = report([*tries, episode(1, 3, 0.0, "EnvError")], 2).scores
    assert set(scores.pass_at) == {1, 2, 4}
    assert scores.pass_at[1].mean == pytest.approx((0.25 + 0) / 2) and scores.pass_at[2].mean == pytest.approx(0.25)
    assert (scores.pass_at[4].mean, scores.pass_at[4].n) == (1.0, 1), "the second task has three samples that count"


def test_rewards_that_add_up_to_the_threshold_reach_it():
    assert report([episode(0, 0, sum([0.1] * 10))], 1).scores.pass_at[1].mean == 1.0


def test_scores_by_tag():
    tagged = [episode(0, 0, 1.0, tag="easy"), episode(1, 0, 0.0, tag="hard"), episode(2, 0, 0.0, "EnvError", "hard")]
    found = report(tagged, 3, "level")
    assert {tag: scores.reward.mean for tag, scores in found.by_tag.items()} == {"easy": 1.0, "hard": 0.0}
    assert "## By level" in found.to_markdown() and found.by_tag["hard"].failures == {"EnvError": 1}


def test_it_is_read_as_it_was_written(tmp_path: Path):
    found = report([episode(0, 0, 1.0, tag="x"), episode(1, 0, 0.0, "EnvError")], 3, "tag")
    found.save(tmp_path)
    again = EvalReport.load(tmp_path)
    assert replace(again, folder=None) == found and again.scores == found.scores and not again.complete
    assert json.loads((tmp_path / "report.json").read_text())["reward"]["ci95"] is None, "infinite, which JSON does not have"
    assert "Not complete" in (tmp_path / "report.md").read_text()
    with pytest.raises(ConfigError, match="holds no evaluation"):
        EvalReport.load(tmp_path / "nowhere")
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not the report"):
        EvalReport.load(tmp_path)


SPEC = relax.get_spec("colour-v0")


def identity(config: RunConfig | None = None, **plan: Any) -> dict[str, Any]:
    return EvalPlan(**plan).identity(SPEC, config or RunConfig("colour-v0"))


def test_a_folder_goes_on_only_with_what_it_was_begun_with(tmp_path: Path):
    keep_plan(tmp_path, identity())
    keep_plan(tmp_path, identity(limit=7, success=0.5))
    with pytest.raises(ConfigError, match=r"samples was 1 and is 4.*--out"):
        keep_plan(tmp_path, identity(samples=4))
    hot = RunConfig("colour-v0", sampling=SamplingParams(temperature=0.5))
    with pytest.raises(ConfigError, match=r"sampling.temperature was 1.0 and is 0.5"):
        keep_plan(tmp_path, identity(hot))


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="not an evaluation"):
        keep_plan(tmp_path, identity())


def test_other_weights_are_noticed(tmp_path: Path):
    weights, out = tmp_path / "hf", tmp_path / "out"
    weights.mkdir()
    out.mkdir()
    (weights / "model.safetensors").write_bytes(b"1")
    keep_plan(out, identity(weights=weights))
    (weights / "model.safetensors").write_bytes(b"22")
    with pytest.raises(ConfigError, match="weights was"):
        keep_plan(out, identity(weights=weights))


def test_the_default_folder_is_the_evaluation_s_own(tmp_path: Path):
    assert default_folder(identity()) == default_folder(identity(limit=3)) != default_folder(identity(samples=2))
    assert default_folder(identity()).name.startswith("colour-v0-tiny-omni-")
    assert beside(tmp_path) == tmp_path.with_name(f"{tmp_path.name}-2") and beside(tmp_path / "x") == tmp_path / "x"


def test_one_sample_is_greedy_and_several_are_not():
    config = RunConfig("colour-v0")
    assert EvalPlan().sampled(config, temperature_given=False).sampling.temperature == 0
    assert EvalPlan().sampled(config, temperature_given=True).sampling.temperature == 1
    assert EvalPlan(samples=2).sampled(config, temperature_given=False).sampling.temperature == 1
    cold = RunConfig("colour-v0", sampling=SamplingParams(temperature=0.0))
    with pytest.raises(ConfigError, match="would be the same"):
        EvalPlan(samples=2).sampled(cold, temperature_given=True)
    with pytest.raises(ConfigError, match="samples = 0"):
        EvalPlan(samples=0)

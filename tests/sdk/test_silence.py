"""A run that learns nothing says so, with the likely cause and the setting to change; one that learns says nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import relax_sdk as relax
from relax_sdk.config import AlgorithmConfig, OptimizerConfig, RolloutConfig, RunConfig, SamplingParams, WarmupConfig
from relax_sdk.doctor import examine_run
from relax_sdk.progress import Progress
from relax_sdk.silence import missing, silence
from relax_sdk.watch import Watch

SCRATCH = AlgorithmConfig(entropy_coef=0.0, kl_coef=0.03)
PRETRAINED = RunConfig(env="e", model="/models/qwen3")


def row(step: int, reward: float = 0.0, **changes: Any) -> dict[str, Any]:
    """A step whose 16 groups all had one reward."""
    flat = dict(n_groups=16, zero_variance_groups=16, reward_min=reward, reward_max=reward, status={"completed": 256})
    return {"step": step, "reward": reward, "entropy": 1.0, "cut_responses": 0.0} | flat | changes


def rows(n: int = 10, **changes: Any) -> list[dict[str, Any]]:
    return [row(i + 1, **changes) for i in range(n)]


def learning(n: int = 10) -> list[dict[str, Any]]:
    return [row(i + 1, 0.3 + 0.05 * i, zero_variance_groups=4, reward_min=0.0, reward_max=1.0) for i in range(n)]


def change(config: RunConfig, **sections: Any) -> RunConfig:
    return dataclasses.replace(config, **sections)


def test_a_run_that_learns_says_nothing():
    assert silence(learning(60), PRETRAINED) is None
    assert silence(rows(9), PRETRAINED) is None  # not yet
    one = [*rows(9), row(10, zero_variance_groups=15)]
    assert silence(one, PRETRAINED) is None


@pytest.mark.parametrize(
    ("config", "examples", "changes", "cause"),
    [
        (PRETRAINED, None, dict(cut_responses=0.99), "99% of the answers are cut at sampling.max_new_tokens = 64"),
        (PRETRAINED, None, dict(status={"truncated": 256}), "rollout.max_turns = 16 and rollout.max_tokens = 4096"),
        (PRETRAINED, None, dict(unreadable_calls=0.97), "97% of the answers hold a tool call that cannot be read"),
        (PRETRAINED, None, {}, "no answer has the form that the environment rewards"),
        (
            change(PRETRAINED, sampling=SamplingParams(max_new_tokens=2)),
            None,
            dict(cut_responses=1.0),
            "raise sampling.max_new_tokens = 2, at which they are cut, where they are longer",
        ),
        (PRETRAINED, None, {}, "compare answers without case and spaces (.strip().lower())"),
        (PRETRAINED, None, dict(reward=1.0, reward_min=1.0, reward_max=1.0), "every one earns 1; let wrong ones earn less"),
        (RunConfig(env="e", algorithm=SCRATCH), False, {}, "the environment has no format_example"),
        (RunConfig(env="e", algorithm=SCRATCH, warmup=WarmupConfig(steps=0)), True, {}, "warmup.steps = 0"),
        (change(PRETRAINED, rollout=RolloutConfig(group_size=1)), None, {}, "set rollout.group_size to 2 or more"),
        (PRETRAINED, None, dict(reward_max=1.0, entropy=0.01), "the policy has stopped trying (entropy 0.010)"),
        (PRETRAINED, None, dict(reward_max=1.0), "too easy or too hard"),
    ],
)
def test_ten_steps_without_a_difference_are_told_with_their_cause(config, examples, changes, cause):
    finding = silence(rows(10, **changes), config, examples)
    assert finding is not None and finding.level == "problem"
    assert "nothing was learnt in the last 10 steps: in each of 160 groups" in finding.what
    assert cause in finding.advice


def test_what_was_answered_is_shown():
    finding = silence([*rows(9), row(10, samples=[{"asked": "2+2?", "answer": "\x00xk", "reward": "0.000"}])], PRETRAINED)
    assert finding is not None and r"an answer was '\x00xk'" in finding.what


def test_a_solved_task_is_no_problem():
    solved = [*learning(12), *(row(13 + i, 1.0) for i in range(10))]
    finding = silence(solved, PRETRAINED)
    assert finding is not None and finding.level == "note" and "1.000: the task is solved" in finding.what


def test_a_reward_that_fell_for_good_is_not_taken_for_solved():
    finding = silence([*learning(12), *(row(13 + i, 0.0) for i in range(10))], PRETRAINED)
    assert finding is not None and finding.level == "problem"


def test_episodes_that_are_all_cut_are_told_though_their_rewards_differ():
    cut = [r | {"status": {"truncated": 256}, "zero_variance_groups": 0} for r in learning(10)]
    finding = silence(cut, PRETRAINED)
    assert finding is not None and "all episodes of the last 10 steps were cut" in finding.what
    assert "rollout.max_turns = 16" in finding.advice
    finding = silence([r | {"cut_responses": 1.0, "turns_mean": 16.0} for r in cut], PRETRAINED)
    assert finding is not None and "rollout.max_turns = 16" in finding.advice, "answers of a letter end at their limit, too"
    finding = silence([r | {"cut_responses": 1.0} for r in cut], PRETRAINED)
    assert finding is not None and "sampling.max_new_tokens = 64" in finding.advice


def test_tool_calls_that_never_can_be_read_are_told_though_rewards_differ():
    wrong = [r | {"unreadable_calls": 0.96} for r in learning(10)]
    finding = silence(wrong, PRETRAINED)
    assert finding is not None and finding.level == "problem"
    assert "96% of the answers of the last 10 steps hold a tool call that cannot be read" in finding.what
    assert "<tool_call>" in finding.advice and "system_prompt" in finding.advice
    assert silence([r | {"unreadable_calls": 0.5} for r in wrong], PRETRAINED) is None


def test_it_is_told_at_the_tenth_step_and_again_every_fifty():
    watch = Watch(PRETRAINED, None)
    told = [step for step in range(1, 131) if watch.step(row(step))]
    assert told == [10, 60, 110]


def test_an_evaluation_of_a_step_is_not_another_step():
    watch = Watch(PRETRAINED, None)
    assert [watch.step(row(1)) for _ in range(20)] == [[]] * 20


def test_a_run_that_goes_on_knows_what_it_has_earned():
    watch = Watch(PRETRAINED, None, learning(12))
    told = [finding for step in range(13, 23) for finding in watch.step(row(step, 1.0))]
    assert len(told) == 1 and "solved" in told[0].what


def said(config: RunConfig, examples: bool | None) -> str:
    return "\n".join(f"{finding.what} → {finding.advice}" for finding in missing(config, examples))


def test_what_a_model_from_random_weights_lacks_is_said_before_the_first_step():
    lacks = said(RunConfig(env="e", algorithm=AlgorithmConfig(entropy_coef=0.01)), False)
    for words in ("no format_example", "cut at 64 tokens", "sampling.max_new_tokens", "relax.FROM_SCRATCH", "pretrained"):
        assert words in lacks
    assert "warmup.steps" in said(RunConfig(env="e", warmup=WarmupConfig(steps=0)), True)


def test_nothing_is_said_where_nothing_lacks():
    warm = WarmupConfig(steps=60)
    ready = RunConfig(env="e", algorithm=SCRATCH, sampling=SamplingParams(max_new_tokens=1), warmup=warm)
    assert said(ready, True) == said(PRETRAINED, False) == ""


@pytest.mark.parametrize("env", [spec.id for spec in relax.list_envs() if spec.registered_in == "relax_envs"])
def test_the_environments_that_ship_lack_nothing(env):
    assert said(relax.Trainer(env).config, True) == ""


def test_a_learning_rate_that_destroys_a_model_is_told_before_the_first_step():
    high = OptimizerConfig(lr=5e-4)
    assert "optimizer.lr = 0.0005 destroys a model that is trained" in said(change(PRETRAINED, optimizer=high), None)
    assert "optimizer.lr" not in said(RunConfig(env="e", optimizer=high), True)
    assert "set optimizer.lr to 0.01 or less" in said(RunConfig(env="e", optimizer=OptimizerConfig(lr=0.5)), True)


def test_a_group_of_one_is_told_before_the_first_step():
    assert "compares the episodes of a group" in said(change(PRETRAINED, rollout=RolloutConfig(group_size=1)), None)


def test_what_to_do_is_a_sentence_of_its_own():
    [finding] = missing(change(PRETRAINED, rollout=RolloutConfig(group_size=1)), None)
    assert "from a single one. Set rollout.group_size to 2 or more" in finding.sentence


def test_the_live_output_shows_an_answer(capsys):
    samples = [{"which": "best", "asked": "?", "answer": "hm", "reward": "0.000"}]
    with Progress(PRETRAINED, Path("there")) as run:
        for step in range(1, 11):
            run.step(row(step, seconds_step=1.0, samples=samples))
    assert capsys.readouterr().err.count("step 1, best: '?' → 'hm' · reward 0.000") == 1


def test_the_doctor_says_it_first_and_gives_no_advice_on_speed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PRETRAINED.to_dict()))
    busy = dict(seconds_step=1.0, seconds_wait=0.6, seconds_train=0.4, staleness_max=0, cut_responses=1.0)
    lines = [row(i, time=100.0 + i, **busy) for i in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    findings = examine_run(tmp_path)
    assert "nothing was learnt" in findings[0].what and findings[0].level == "problem"
    text = "\n".join(map(str, findings))
    assert "add engines" not in text and "fine when" not in text and "the engine is the slower half" not in text

"""Each check names what is wrong in the figures that show it, and says nothing of a run that is well."""

from __future__ import annotations

from typing import Any

import pytest

from relax_sdk.config import RolloutConfig, RunConfig
from relax_sdk.run_checks import CHECKS, RunFigures, findings_of
from relax_sdk.watch import Watch

CONFIG = RunConfig(env="e", model="/models/qwen3")


def row(step: int, **changes: Any) -> dict[str, Any]:
    """A step of a run that is well: two reward components, answers of 20 tokens, an image a task, 64 tasks."""
    well = dict(
        reward=0.3 + 0.01 * step,
        reward_min=0.0,
        reward_max=1.5,
        n_groups=8,
        zero_variance_groups=2,
        entropy=0.6,
        cut_responses=0.02,
        rewards={"right": 0.3 + 0.01 * step, "short": 0.5},
        rewards_std={"right": 0.4, "short": 0.2},
        answer_tokens_mean=20.0,
        turns_mean=1.0,
        observations=8,
        media_different={"image": 8},
        n_response_tokens=1280,
        seconds_step=1.0,
        seconds_wait=0.1,
        seconds_train=0.8,
        seconds_publish=0.1,
        seconds_load=0.0,
        episode_seconds={"generate": 0.5, "step": 0.01, "total": 0.5},
        staleness_max=0,
        logprob_gap_image=1e-6,
        logprob_gap_text=1e-6,
        rollout_tasks=64,
        rollout_tasks_played=min(8 * step, 64),
        rollout_failed_attempts=0,
        rollout_failing_tasks_total=0,
        status={"completed": 64},
    )
    return {"step": step} | well | changes


def rows(n: int, **changes: Any) -> list[dict[str, Any]]:
    return [row(step, **changes) for step in range(1, n + 1)]


def said(rows: list[dict[str, Any]], config: RunConfig = CONFIG) -> dict[str, str]:
    return {name: f"{finding.what} → {finding.advice}" for name, finding in findings_of(RunFigures(rows, config)).items()}


def evaluated(*rewards: float, rising: float = 0.1) -> list[dict[str, Any]]:
    """A run whose held-out rewards are known at every fifth step."""
    out = [row(step, reward=0.3 + rising * step / 10) for step in range(1, 5 * len(rewards) + 1)]
    for number, reward in enumerate(rewards):
        out[5 * number + 4] |= {"eval_reward": reward, "eval_ci95": 0.03}
    return out


def failing(*worst: tuple[int, int], attempts: int, total: int, played: int) -> list[dict[str, Any]]:
    changes = dict(rollout_failed_attempts=attempts, rollout_failing_tasks_total=total, rollout_tasks_played=played)
    return rows(6, rollout_failing_tasks=[list(pair) for pair in worst], **changes)


def collapsing(reward: float) -> list[dict[str, Any]]:
    gone = dict(entropy=0.001, zero_variance_groups=8, reward=reward, reward_max=reward)
    return [row(1, entropy=3.0), row(2), *(row(step, **gone) for step in range(3, 9))]


def collapsing_late() -> list[dict[str, Any]]:
    gone = dict(entropy=0.001, zero_variance_groups=8, reward=0.7, reward_max=1.5)
    return [
        row(1, entropy=3.0),
        *(row(step, reward=0.3 + 0.1 * step) for step in range(2, 11)),
        *(row(step, **gone) for step in range(11, 16)),
    ]


def growing(pays: float, cut: float) -> list[dict[str, Any]]:
    return [row(step, answer_tokens_mean=20 + pays * step, cut_responses=cut * step / 12) for step in range(1, 13)]


def fresh(tokens: int = 16, **gaps: float) -> list[dict[str, Any]]:
    """An asynchronous run: batches of older weights, which differ by what was learnt since, with some fresh samples."""
    told = dict(logprob_gap_fresh=gaps, fresh_tokens=dict.fromkeys(gaps, tokens))
    return rows(6, staleness_max=1, logprob_gap_image=0.25, logprob_gap_text=0.01, **told)


def slowing(seconds: float) -> list[dict[str, Any]]:
    later = dict(seconds_step=1.0 + seconds, seconds_train=0.8 + seconds, n_response_tokens=2560)
    return [*rows(13), *(row(step, **later) for step in range(14, 34))]


SAME_IMAGE = dict(media_different={"image": 1}, observations=1)
NO_MEDIA = dict(media_different={}, observations=1)
SLOW = dict(seconds_wait=0.8, episode_seconds={"generate": 0.1, "step": 2.0, "total": 2.2})

WRONG = [
    ("nothing_learnt", rows(10, zero_variance_groups=8), "choose others, raise rollout.group_size"),
    ("collapse", collapsing(0.25), "lower optimizer.lr = 1e-06"),
    ("collapse", collapsing_late(), "the reward is 0.700, which was 1.300 before"),
    (
        "constant_component",
        rows(10, rewards={"right": 0.4, "short": 0.0}, rewards_std={"right": 0.4, "short": 0.0}),
        "the reward component 'short' was 0 in every episode of the last 10 steps, while 'right' moved",
    ),
    ("held_out_falls", evaluated(0.4, 0.6, 0.5), "fell from 0.600 at step 10 to 0.500 at step 15"),
    ("same_media", rows(3, **SAME_IMAGE), "the same image was shown in all episodes of the last 3 steps"),
    ("same_question", rows(3, **NO_MEDIA), "let `reset` show what is in options['task']"),
    ("few_tasks", rows(3, rollout_tasks=3), "only 3 training tasks for batches of 16 groups"),
    ("failing_tasks", failing((7, 9), (3, 2), attempts=12, total=2, played=48), "7 (9), 3 (2)"),
    ("growing_answers", growing(3.0, 0.6), "cut at sampling.max_new_tokens = 64"),
    ("slow_environment", rows(8, **SLOW), "an episode spends 2.00 s in step"),
    ("slower", slowing(0.8), "1.8 times as long as the first ones (1.00 s); most of it is training; a batch has 2560"),
    ("gap_by_modality", rows(4, logprob_gap_image=0.02), "differ by 2.0e-02 nats a token in fresh samples with image, 1.0e-06"),
    ("gap_by_modality", [row(1, logprob_gap_image=0.02), *rows(3, staleness_max=1)[1:]], "differ by 2.0e-02 nats"),
    ("gap_by_modality", fresh(image=0.02, text=1e-6), "differ by 2.0e-02 nats a token in fresh samples with image, 1.0e-06"),
]

WELL = [
    ("few steps", rows(2)),
    ("many steps", rows(60)),
    ("figures of an older version", [{"step": step, "reward": 0.1 * step, "n_groups": 4} for step in range(1, 30)]),
    ("steps that never pay beside a reward", rows(12, rewards_std={"env": 0.0, "a": 0.3}, rewards={"env": 0.0, "a": 0.3})),
    ("a held-out reward within its uncertainty", evaluated(0.4, 0.6, 0.55)),
    ("a held-out reward that falls with the training reward", evaluated(0.4, 0.6, 0.3, rising=-0.1)),
    ("four different sounds for all tasks", rows(12, media_different={"audio": 4}, observations=4)),
    ("one image, but too few tasks to say so", rows(2, n_groups=4, **SAME_IMAGE)),
    ("one task, and as many groups as that is worth", rows(6, rollout_tasks=1, n_groups=1, **SAME_IMAGE)),
    ("a game that always begins in the same way", rows(12, turns_mean=9.0, **NO_MEDIA)),
    ("failures of many tasks", failing((7, 2), (3, 2), attempts=40, total=24, played=48)),
    ("failures of all of a few tasks", failing((1, 9), (0, 9), attempts=18, total=2, played=2)),
    ("answers that grow and end", growing(3.0, 0.05)),
    ("answers that were always cut", [r | {"cut_responses": 1.0} for r in growing(0.0, 0.0)]),
    ("a step that takes a little longer", slowing(0.15)),
    ("a slow environment beside a slower trainer", rows(12, **(SLOW | {"seconds_wait": 0.1}))),
    ("a task that is solved for good", collapsing(1.5)),
    ("a task that is solved but for a few", collapsing(1.4)),
    ("rounding", rows(6, logprob_gap_image=2e-5, logprob_gap_text=1e-6)),
    ("older weights, which differ most where most was learnt", rows(6, staleness_max=1, logprob_gap_image=0.05)),
    ("learnt since, beside fresh samples that agree", fresh(image=2e-6, text=1e-6)),
    ("few fresh tokens", fresh(tokens=9, image=0.02, text=1e-6)),
    ("older weights alone", fresh()),
    ("bfloat16", rows(6, logprob_gap_image=0.02, logprob_gap_text=0.015)),
]


@pytest.mark.parametrize(("name", "rows", "words"), WRONG, ids=[name for name, *_ in WRONG])
def test_a_check_names_what_is_wrong_and_no_other_does(name, rows, words):
    found = said(rows)
    assert list(found) == [name]
    assert words in found[name]


def test_each_check_has_its_example():
    assert {name for name, *_ in WRONG} == set(CHECKS)


@pytest.mark.parametrize("rows", [rows for _, rows in WELL], ids=[what for what, _ in WELL])
def test_nothing_is_said_of(rows):
    assert said(rows) == {}


def test_fewer_tasks_than_a_batch_are_no_fault_where_the_batch_was_chosen_so():
    assert said(rows(6, rollout_tasks=8), RunConfig(env="e", model="m", rollout=RolloutConfig(groups_per_step=8))) == {}


def test_several_things_are_told_and_each_but_once():
    watch = Watch(CONFIG, None)
    wrong = rows(40, rollout_tasks=3, rewards_std={"right": 0.4, "short": 0.0}, rewards={"right": 0.4, "short": 0.0})
    told = [(row["step"], finding.what[:20]) for row in wrong for finding in watch.step(row)]
    assert told == [(3, "there are only 3 tra"), (10, "the reward component")]


def test_a_held_out_reward_is_judged_when_it_comes():
    watch = Watch(CONFIG, None)
    known = evaluated(*[0.6] * 7, 0.5)
    for step in known[:-1]:
        assert watch.step(step) == []
    last = known[-1]
    assert watch.step({name: value for name, value in last.items() if not name.startswith("eval_")}) == []
    (finding,) = watch.step(last)
    assert "the held-out reward fell" in finding.what
    assert watch.step(last) == []

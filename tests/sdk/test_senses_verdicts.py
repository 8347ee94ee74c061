"""Verdicts of the blindness check, from numbers alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from relax_sdk.doctor import senses_findings
from relax_sdk.evals.blank import blank, is_blank
from relax_sdk.evals.senses import Condition, SensePass, SensesReport, SensesResults, Shown, donors_of, judge
from relax_sdk.media import Audio, Image, Media, Video

N = 64
RIGHT = {t: 1.0 for t in range(N)}
CHANCE = {t: float(t % 4 == 0) for t in range(N)}


def played(condition: Condition, rewards: dict[int, float], kind: str = "image", says: str = "") -> SensePass:
    return SensePass(condition, kind, rewards, {t: says or f"{condition} {t}" for t in rewards})


def verdict(
    *passes: SensePass, base: dict[int, float] = RIGHT, floor: dict[int, float] = CHANCE, blank: int = 0, distinct: int = N
):
    first = [played("as it is", base, "all", "A"), played("another task's", floor, "all")]
    shown = [Shown("image", N, N, blank, distinct)]
    return judge(SensesResults("e-v0", "m", "eval", N, ["image"], shown, [*first, *passes]))


def test_a_fall_is_use():
    report = verdict(played("blanked", CHANCE), played("shuffled", CHANCE))
    assert report.ok and report.verdicts["image"].what.startswith("used: the reward falls from 1.000 by 0.75")


def test_a_leak_of_a_part_is_named_beside_the_use():
    half = {t: float(t % 4 != 1) for t in range(N)}
    report = verdict(played("blanked", half), played("shuffled", CHANCE))
    assert report.verdicts["image"].level == "ok" and not report.ok and "still 0.750" in report.verdicts["text"].what


def test_a_leak_is_named_where_the_policy_reads_but_answers_nothing_to_a_grey_picture():
    most = {t: float(t % 4 != 1) for t in range(N)}
    report = verdict(played("blanked", CHANCE), played("shuffled", most))
    assert not report.ok and "with all media shuffled the reward is still 0.750" in report.verdicts["text"].what


def test_what_earns_nothing_is_not_called_used_or_leaking():
    report = verdict(played("blanked", CHANCE), played("shuffled", CHANCE), base=CHANCE)
    assert report.verdicts["image"].what.startswith("nothing learnt") and report.verdicts["image"].level == "note"
    same = verdict(played("blanked", CHANCE, says="A"), played("shuffled", CHANCE, says="A"), base=CHANCE)
    assert "answers are the same whatever images are shown" in same.verdicts["image"].what and not same.ok


def two_senses(earned: dict[int, float], without_sound: dict[int, float]) -> SensesReport:
    """Pictures give a part of the reward: without them it is that of knowing nothing, 0.25."""
    passes = [
        played("as it is", earned, "all"),
        played("another task's", CHANCE, "all"),
        played("blanked", CHANCE, "all"),
        *(played(condition, CHANCE, "image") for condition in ("blanked", "shuffled")),
        *(played(condition, without_sound, "audio") for condition in ("blanked", "shuffled")),
    ]
    shown = [Shown(kind, N, N, 0, N) for kind in ("audio", "image")]
    return judge(SensesResults("e-v0", "m", "eval", N, ["audio", "image"], shown, passes))


HALF_RIGHT = {t: 2.0 if t % 2 == 0 else 1.0 for t in range(N)}
"""One of two locks opens always, the other as often as not."""


def test_a_deaf_policy_that_could_earn_more_is_a_problem():
    report = two_senses(HALF_RIGHT, HALF_RIGHT)
    found = report.verdicts["audio"]
    assert not report.ok and found.level == "problem" and "suffice" not in found.sentence
    assert "does not use the sounds; its reward of 1.500, where the best task earned 2.000, changes by +0.000" in found.what


@pytest.mark.parametrize("short", [0, 1])
def test_the_other_senses_suffice_where_they_reach_the_full_reward_within_the_interval(short: int):
    found = two_senses(full := RIGHT | dict.fromkeys(range(short), 0.0), full).verdicts["audio"]
    assert (found.level, found.advice) == ("note", "the images suffice")


def test_where_little_is_left_to_earn_nothing_is_said_to_suffice():
    most = {t: float(t % 16 != 0) for t in range(N)}
    found = two_senses(most, most).verdicts["audio"]
    assert found.level == "note" and found.what.startswith("not used") and "too little is left" in found.advice


def test_a_sense_that_may_be_used_a_little_is_no_problem():
    less = {t: 2.0 if t % 2 else 0.0 if t < 40 else 2.0 for t in range(N)}  # -0.125, and the interval reaches to -0.45
    found = two_senses(HALF_RIGHT, less).verdicts["audio"]
    assert found.level == "note" and "raise --limit" in found.advice


def test_few_tasks_are_no_verdict():
    few = {t: 1.0 for t in range(4)}
    report = verdict(
        played("blanked", few | {0: 0.0}),
        played("shuffled", few | {1: 0.0}),
        base=few,
        floor={t: 0.0 for t in range(4)},
        distinct=4,
    )
    assert report.verdicts["image"].what.startswith("unclear") and report.verdicts["image"].level == "note"


def test_media_that_say_nothing_are_named_before_all_else():
    assert "are blank" in verdict(blank=N).verdicts["image"].what
    assert "show the same image" in verdict(distinct=1).verdicts["image"].what
    dropped = judge(SensesResults("e-v0", "m", "eval", N, ["audio"], [], [played("as it is", RIGHT, "all")]))
    assert "they are dropped" in dropped.verdicts["audio"].what and not dropped.ok
    assert judge(SensesResults("e-v0", "m", "eval", N, [], [], [played("as it is", RIGHT, "all")])).verdicts == {}


@pytest.mark.parametrize("condition", ["shuffled", "pairs", "next", "previous"])
@pytest.mark.parametrize("n", [2, 5, 8])
def test_nobody_is_given_its_own(condition: Condition, n: int):
    tasks = [10 * t for t in range(n)]
    donors = donors_of(tasks, condition, list(np.random.default_rng(0).permutation(tasks)))
    assert all(task != donor for task, donor in donors.items()) and set(donors.values()) == set(donors)
    assert len(donors) == (n // 2 * 2 if condition == "pairs" else n)
    assert donors_of([3], condition, [3]) == {}


@pytest.mark.parametrize(
    "part",
    [
        Audio.from_array(np.sin(np.arange(24_000) / 9).astype(np.float32), 24_000),
        Image.from_array(np.random.default_rng(0).integers(0, 255, (33, 47, 3), np.uint8)),
        Video.from_array(np.random.default_rng(0).integers(0, 255, (6, 32, 48, 3), np.uint8), fps=3),
    ],
)
def test_blank_media_are_as_long_and_as_large(part: Media):
    empty = blank(part)
    assert not is_blank(part) and is_blank(empty) and type(empty) is type(part)
    assert (empty.ref.width, empty.ref.height, empty.ref.duration) == (part.ref.width, part.ref.height, part.ref.duration)


def test_the_doctor_repeats_the_newest_check(tmp_path: Path):
    assert senses_findings(tmp_path) == []
    report: SensesReport = verdict(distinct=1)
    (tmp_path / "senses").mkdir()
    (tmp_path / "senses" / "senses.json").write_text(json.dumps(report.to_dict()))
    found = senses_findings(tmp_path)
    assert senses_findings(tmp_path / "senses") == found  # the folder of the check itself
    assert [f.level for f in found] == ["problem"] and found[0].what.startswith("image: all 64 tasks show the same")
    (tmp_path / "senses" / "senses.json").write_text("{")
    assert "cannot be read" in senses_findings(tmp_path)[0].what

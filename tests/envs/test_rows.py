"""The rows of the shipped environments: made from their number alone, balanced, and train and eval without overlap."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from relax_envs import colour, higher_lower, motion, omni_quiz, tone
from relax_envs.rows import EVAL_ROWS, TRAIN_ROWS, GeneratedRows

import relax_sdk as relax
from relax_sdk.media import Media
from relax_sdk.tasks import task_splits

SOURCES = {
    "tone": tone.tasks,
    "colour": colour.tasks,
    "motion": motion.tasks,
    "motion-shuffled": motion.shuffled_tasks,
    "omni-quiz": omni_quiz.tasks,
    "higher-lower": higher_lower.tasks,
}
MEDIA = [name for name in SOURCES if name != "higher-lower"]


def hashes(row: dict[str, Any]) -> set[str]:
    return {part.ref.sha256 for part in row.values() if isinstance(part, Media)}


@pytest.mark.parametrize("name", SOURCES)
def test_splits_behave_as_sequences(name: str) -> None:
    rows = SOURCES[name]()
    assert (len(rows["train"]), len(rows["eval"])) == (TRAIN_ROWS, EVAL_ROWS)
    train = rows["train"]
    assert train[-1] == train[TRAIN_ROWS - 1] and train[np.int64(5)] == train[5]
    assert train[3:6] == [train[3], train[4], train[5]]
    with pytest.raises(IndexError, match=f"row {TRAIN_ROWS} of {TRAIN_ROWS}"):
        train[TRAIN_ROWS]
    assert task_splits(SOURCES[name])["eval"].row(EVAL_ROWS + 1) == rows["eval"][1]


@pytest.mark.parametrize("name", SOURCES)
def test_a_row_depends_on_nothing_but_its_number(name: str) -> None:
    """A fresh process, asked in another order, makes the same bytes."""
    module, _, function = {
        "motion-shuffled": "motion:shuffled_tasks",
    }.get(name, f"{name.replace('-', '_')}:tasks").partition(":")
    code = (
        f"from relax_envs.{module} import {function} as tasks\n"
        "from relax_sdk.media import Media\n"
        "rows = [tasks()['train'][i] for i in (999_999, 7)]\n"
        "print([[v.ref.sha256 if isinstance(v, Media) else v for v in r.values()] for r in reversed(rows)])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    here = [SOURCES[name]()["train"][i] for i in (7, 999_999)]
    assert run.stdout.strip() == str([[v.ref.sha256 if isinstance(v, Media) else v for v in r.values()] for r in here])


@pytest.mark.parametrize("name", MEDIA)
def test_all_samples_of_a_group_share_the_bytes(name: str) -> None:
    train = SOURCES[name]()["train"]
    once, again = train[11], SOURCES[name]()["train"][11]
    for key, part in once.items():
        if isinstance(part, Media):
            assert again[key].bytes() is part.bytes()
    once["answer"] = "changed"
    assert train[11]["answer"] != "changed"


@pytest.mark.parametrize("name", SOURCES)
def test_rows_can_be_pickled_and_hold_no_data(name: str) -> None:
    train = SOURCES[name]()["train"]
    train[1], train[2]
    stored = pickle.dumps(train)
    assert len(stored) < 500
    assert pickle.loads(stored)[2] == train[2]


@pytest.mark.parametrize("name", MEDIA)
def test_train_and_eval_do_not_overlap(name: str, first_rows: Any) -> None:
    train, held_out = [[hashes(row) for row in first_rows(name, 32, split)] for split in ("train", "eval")]
    assert len(set.union(*train)) == len(set.union(*held_out)) == 32 * len(train[0]), "every row differs from every other"
    assert not set.union(*train) & set.union(*held_out)


@pytest.mark.parametrize(("name", "classes"), [("tone", 4), ("colour", 4), ("motion", 2), ("motion-shuffled", 2)])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_answers_are_equally_frequent(name: str, classes: int, split: str, first_rows: Any) -> None:
    frequency = Counter(row["answer"] for row in first_rows(name, 32, split))
    assert frequency == dict.fromkeys("ABCD"[:classes], 32 // classes)


def test_answers_of_the_quiz_are_equally_frequent() -> None:
    answers = [omni_quiz.make_row(label, np.random.default_rng(0))["answer"] for label in range(32)]
    assert len(set(answers)) == 32
    for split in ("train", "eval"):
        labels = GeneratedRows(identity, 32, "omni-quiz", split, EVAL_ROWS)
        assert Counter(row["label"] for row in labels) == dict.fromkeys(range(32), EVAL_ROWS // 32)


def test_numbers_are_equally_frequent() -> None:
    for rows in higher_lower.tasks().values():
        assert Counter(rows[i]["number"] for i in range(EVAL_ROWS)) == dict.fromkeys(range(1, 9), EVAL_ROWS // 8)


def identity(label: int, rng: np.random.Generator) -> dict[str, int]:
    return {"label": label}


def test_the_order_of_answers_does_not_repeat() -> None:
    labels = [row["label"] for row in GeneratedRows(identity, 4, "order", "train", 1024)[:]]
    blocks = {tuple(labels[i : i + 32]) for i in range(0, 1024, 32)}
    assert len(blocks) == 32
    after = Counter(itertools.pairwise(labels))
    assert max(after.values()) < 2 * 1024 / 16, "no answer foretells the next"


def test_the_control_shows_the_same_clips() -> None:
    from relax_sdk.media import decode_video

    for i in range(3):
        ordered, shuffled = motion.tasks()["eval"][i], motion.shuffled_tasks()["eval"][i]
        assert ordered["answer"] == shuffled["answer"] and hashes(ordered) != hashes(shuffled)
        a, b = (decode_video(row["video"].bytes())[0].astype(float) for row in (ordered, shuffled))
        distance = np.abs(a[:, None] - b[None]).mean((2, 3, 4))
        nearest = distance.argmin(1)
        assert sorted(nearest) == list(range(8)) and distance.min(1).max() < 5, "every frame is there once"


def test_registered_settings_are_accepted() -> None:
    for spec in relax.list_envs():
        if spec.id.removesuffix("-v0") in SOURCES:
            trainer = relax.Trainer(env=spec.id)
            assert trainer.config.warmup.steps > 0 and trainer.config.sampling.max_new_tokens <= 16

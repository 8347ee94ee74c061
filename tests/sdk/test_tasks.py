"""Tasks: lists, generators, data sets and dictionaries of them by split."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from relax_sdk.errors import ConfigError
from relax_sdk.media import Audio, Image, decode_audio
from relax_sdk.tasks import TaskSplit, task_splits

ROWS = [{"x": i} for i in range(5)]


def count() -> Iterator[dict[str, int]]:
    return ({"x": i} for i in itertools.count())


def test_a_list_wraps_around() -> None:
    split = TaskSplit("train", ROWS)
    assert (len(split), split.finite) == (5, True)
    assert [split.row(i)["x"] for i in (0, 4, 5, 12, 1_000_000)] == [0, 4, 0, 2, 0]


def test_a_row_can_be_changed_without_changing_the_source() -> None:
    split = TaskSplit("train", ROWS)
    split.row(0)["x"] = "changed"
    assert split.row(0) == {"x": 0} == ROWS[0]


def test_a_generator_goes_forward() -> None:
    split = TaskSplit("train", count())
    assert not split.finite
    assert [split.row(i)["x"] for i in (0, 1, 7, 8)] == [0, 1, 7, 8]
    with pytest.raises(ConfigError, match=r"row 3 has gone by \(now at 9\)"):
        split.row(3)
    with pytest.raises(ConfigError, match="is a generator and has no length"):
        len(split)


def test_a_generator_that_ends() -> None:
    split = TaskSplit("train", (row for row in ROWS))
    assert split.row(4) == {"x": 4}
    with pytest.raises(ConfigError, match="the generator ended before row 5"):
        split.row(5)


def test_without_tasks_the_row_is_its_number() -> None:
    split = task_splits(None)["train"]
    assert [split.row(0), split.row(41)] == [{"index": 0}, {"index": 41}]


@pytest.mark.parametrize(
    "tasks",
    [ROWS, tuple(ROWS), lambda: ROWS, lambda: iter(ROWS), (r for r in ROWS), {"train": ROWS}, {"train": lambda: ROWS}],
    ids=["list", "tuple", "function", "function of an iterator", "generator", "dict", "dict of functions"],
)
def test_every_form_of_tasks(tasks: Any) -> None:
    splits = task_splits(tasks)
    assert list(splits) == ["train"]
    assert [splits["train"].row(i) for i in range(5)] == ROWS


def test_splits() -> None:
    splits = task_splits(lambda: {"train": count(), "eval": ROWS[:2]})
    assert not splits["train"].finite and len(splits["eval"]) == 2
    with pytest.raises(ConfigError, match=r"need a 'train' split, got \['test'\]"):
        task_splits({"test": ROWS})


@pytest.mark.parametrize(
    ("tasks", "why"),
    [
        ([], r"tasks\['train'\] is empty"),
        ({"train": []}, r"tasks\['train'\] is empty"),
        (3, "must be a list, a generator, a datasets.Dataset or a function, got int"),
        ({"train": 3}, "got int"),
    ],
)
def test_what_are_no_tasks(tasks: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        task_splits(tasks)


@pytest.mark.parametrize("tasks", [["a"], "abc", [("x", 1)], iter([3])], ids=["strings", "string", "tuples", "numbers"])
def test_what_is_no_row(tasks: Any) -> None:
    with pytest.raises(ConfigError, match="row 0 must be a mapping, got"):
        task_splits(tasks)["train"].row(0)


# -------------------------------------------------------------------------------------------------- Hugging Face data sets


def png(value: int) -> bytes:
    return Image.from_array(np.full((4, 4, 3), value, np.uint8)).bytes()


def wav(value: float) -> bytes:
    return Audio.from_array(np.full(160, value, np.float32)).bytes()


def test_a_dataset_by_split() -> None:
    datasets = pytest.importorskip("datasets")
    both = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "eval": datasets.Dataset.from_list(ROWS[:2])})
    splits = task_splits(both)
    assert splits["train"].row(6) == {"x": 1} and len(splits["eval"]) == 2
    assert task_splits(both["train"])["train"].row(3) == {"x": 3}
    assert task_splits({"train": both["train"], "eval": ROWS})["eval"].row(4) == {"x": 4}


@pytest.mark.parametrize(
    ("names", "taken"), [(["train", "test"], 2), (["train", "validation", "test"], 1), (["train", "test", "eval"], 3)]
)
def test_a_dataset_s_own_name_of_its_held_out_split_will_do(names: list[str], taken: int) -> None:
    datasets = pytest.importorskip("datasets")
    length = {"train": 5, "test": 2, "validation": 1, "eval": 3}
    splits = task_splits(datasets.DatasetDict({name: datasets.Dataset.from_list(ROWS[: length[name]]) for name in names}))
    assert len(splits["eval"]) == taken and set(splits) == {*names, "eval"}


def test_a_streamed_dataset_goes_forward() -> None:
    datasets = pytest.importorskip("datasets")
    split = task_splits(datasets.IterableDataset.from_generator(lambda: iter(ROWS)))["train"]
    assert not split.finite and split.row(2) == {"x": 2}
    with pytest.raises(ConfigError, match="ended before row 5"):
        split.row(5)


def test_images_of_a_dataset_are_taken_undecoded() -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"image": {"bytes": png(i), "path": None}, "answer": i} for i in range(3)]
    data = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image(decode=False))
    row = task_splits(data)["train"].row(1)
    assert Image.from_bytes(row["image"]["bytes"]) == Image.from_bytes(png(1))


def test_sounds_of_a_dataset_need_no_codec_library(tmp_path) -> None:
    """`datasets` wants torchcodec to *build* an Audio column; a plain struct, cast afterwards, needs none."""
    datasets = pytest.importorskip("datasets")
    rows = [{"audio": {"bytes": wav(v), "path": None}, "answer": v} for v in (0.25, 0.5)]
    data = datasets.Dataset.from_list(rows).cast_column("audio", datasets.Audio(decode=False))
    data.to_parquet(tmp_path / "sounds.parquet")
    again = datasets.Dataset.from_parquet(str(tmp_path / "sounds.parquet"), cache_dir=str(tmp_path / "cache"))
    for source in (data, again):
        row = task_splits(source)["train"].row(1)
        assert Audio.from_bytes(row["audio"]["bytes"]).bytes() == wav(0.5)
        np.testing.assert_allclose(decode_audio(row["audio"]["bytes"]), 0.5, atol=1e-4)


def test_rows_with_media_can_be_pickled() -> None:
    row = {"image": Image.from_bytes(png(3))}
    split = TaskSplit("train", [row])
    again = pickle.loads(pickle.dumps(split.row(0)))
    assert again == row and io.BytesIO(again["image"].bytes()).read() == png(3)

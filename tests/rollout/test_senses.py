"""The blindness check with a policy that really decodes media: four planted faults are named, honest environments pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from decoding_endpoint import DecodingEndpoint
from relax_envs.choice import ChoiceEnv
from relax_envs.colour import ColourEnv, make_row
from relax_envs.motion import MotionEnv
from relax_envs.rows import GeneratedRows
from relax_envs.tone import ToneEnv
from relax_server.journal import open_journal

import relax_sdk as relax
from relax_sdk import Audio, Endpoint, MediaStore, SensesReport
from relax_sdk.evals.blank import is_blank

TASKS = 16


@pytest.fixture(scope="module")
def decoder() -> Iterator[Endpoint]:
    endpoint = DecodingEndpoint()
    yield Endpoint(endpoint.url, "decoder", "", concurrency=16)
    endpoint.close()


def check(env: Any, endpoint: Endpoint, folder: Path, limit: int = TASKS) -> SensesReport:
    report = relax.check_senses(env, endpoint, limit=limit, out=folder / "out", progress=False)
    print(report)
    return report


SLOW = pytest.param("omni-quiz-v0", marks=pytest.mark.nightly)
HONEST = ("tone-v0", "colour-v0", "motion-v0", SLOW, "higher-lower-v0")


@pytest.mark.parametrize("env", HONEST)
def test_honest_environments_pass(env: str, decoder: Endpoint, tmp_path: Path):
    report = check(env, decoder, tmp_path)
    assert report.ok, report
    assert set(report.verdicts) == relax.get_spec(env).load().modalities
    assert all(verdict.level == "ok" and verdict.what.startswith("used: ") for verdict in report.verdicts.values()), report


class Faulty(ChoiceEnv):
    """Shows something else than it should."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        (shown, question), info = super().reset(seed=seed, options=options)  # type: ignore[misc]
        return self.spoil(shown, question, (options or {})["task"]), info

    def spoil(self, shown: Any, question: str, task: Any) -> Any:
        raise NotImplementedError


class DroppedVideo(Faulty, MotionEnv):
    def spoil(self, shown: Any, question: str, task: Any) -> Any:
        return question


class BlankedAudio(Faulty, ToneEnv):
    def spoil(self, shown: Any, question: str, task: Any) -> Any:
        return [Audio.from_array(np.zeros(16_000, np.float32)), question]


class Leaked(Faulty, ColourEnv):
    def spoil(self, shown: Any, question: str, task: Any) -> Any:
        return [shown, f"{question} (row of colour.csv, answer: {task['answer']})"]


class PartlyLeaked(Leaked):
    def spoil(self, shown: Any, question: str, task: Any) -> Any:
        return super().spoil(shown, question, task) if task["answer"] in "ABC" else [shown, question]


class Columns(GeneratedRows):
    """Rows whose pictures are those of other rows."""

    step: ClassVar[int] = 0

    def __getitem__(self, index: Any) -> Any:
        other = index ^ 1 if self.step == 0 else (index + self.step) % len(self)
        return super().__getitem__(index) | {"image": super().__getitem__(other)["image"]}


class OffByOne(Columns):
    step = 1


class Swapped(ColourEnv):
    rows: ClassVar[type[GeneratedRows]] = Columns

    @staticmethod
    def tasks() -> Any:
        return _other_pictures(Columns)


class Shifted(ColourEnv):
    @staticmethod
    def tasks() -> Any:
        return _other_pictures(OffByOne)


def _other_pictures(rows: type[GeneratedRows]) -> Any:
    return {split: rows(make_row, 4, "colour", split, 64) for split in ("train", "eval")}


@pytest.mark.parametrize(
    ("env", "kind", "says"),
    [
        (DroppedVideo, "video", "no task shows one: they are dropped"),
        (BlankedAudio, "audio", "16 of 16 sounds are blank (silent) before anything was changed"),
        (Leaked, "image", "the task leaks its answers"),
        (PartlyLeaked, "text", "leaks: with all media"),
        (Swapped, "image", "swapped between samples: the reward is"),
        (Shifted, "image", "gets the images of the task before it"),
    ],
)
def test_planted_faults_are_named(env: Any, kind: str, says: str, decoder: Endpoint, tmp_path: Path):
    report = check(env, decoder, tmp_path, 32 if env is PartlyLeaked else TASKS)
    assert not report.ok and report.verdicts[kind].level == "problem" and says in report.verdicts[kind].what, report


def test_a_policy_that_does_not_look_is_told_from_a_leak(decoder: Endpoint, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("decoding_endpoint.see", lambda pixels: "B")
    report = check("colour-v0", decoder, tmp_path)
    assert "the answers are the same whatever images are shown" in report.verdicts["image"].what and not report.ok


def test_one_of_two_senses_that_say_the_same_is_no_fault(decoder: Endpoint, tmp_path: Path):
    class Both(ColourEnv):
        """Shows the same picture as image and as film; the decoder looks at what comes first."""

        modalities: ClassVar[set[str]] = {"image", "video"}

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            (shown, question), info = super().reset(seed=seed, options=options)  # type: ignore[misc]
            row = MotionEnv.tasks()["eval"][int((options or {})["task"]["answer"] in "CD")]
            return [shown, row["video"], question], info

    report = check(Both, decoder, tmp_path)
    assert report.verdicts["image"].level == "ok" and report.verdicts["video"].level in ("note", "problem"), report


def test_only_what_is_shown_changes_and_it_does_so_in_the_same_way_again(decoder: Endpoint, tmp_path: Path):
    first, again = (check("tone-v0", decoder, tmp_path / name, 8) for name in "ab")
    assert first.results == again.results and (tmp_path / "a" / "out" / "senses.md").read_text() == str(first)
    folder = tmp_path / "a" / "out"
    journal, store = open_journal(folder / "journal.db"), MediaStore(folder / "media")
    kept = {row.id: journal.trajectory(row.id) for row in journal.trajectories("out", "eval", limit=1000)}
    journal.close()
    plain, blanked = (kept[f"out/eval/0-{name}/3/0"] for name in ("as-it-is-all", "blanked-audio"))
    assert plain.seed == blanked.seed and plain.turns[0].media[0].sha256 != blanked.turns[0].media[0].sha256
    assert plain.turns[0].media[0].duration == blanked.turns[0].media[0].duration
    assert is_blank(store.load(blanked.turns[0].media[0])) and not is_blank(store.load(plain.turns[0].media[0]))

"""Figures of evaluations and of blindness checks, as the viewer answers them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from judged_run import make_judged, senses
from relax_server.viewer.folders import FolderSource
from relax_server.viewer.journals import Journals
from relax_server.viewer.measured import Measured
from relax_server.viewer.pages import Pages

from relax_sdk.evals.check import save


def page(folder: Path) -> dict:
    answer = Pages().answer(FolderSource([folder], Journals()), ["runs", folder.name, "run.json"], {})
    assert isinstance(answer, dict)
    return answer


def test_the_page_of_an_evaluation_has_its_figures_but_not_its_episodes(tmp_path: Path) -> None:
    report = page(make_judged(tmp_path))["report"]
    assert (report["of"], report["tasks"], report["episodes"], report["complete"]) == (8, 7, 16, True)
    assert report["reward"]["mean"] == pytest.approx(0.5) and report["reward"]["n"] == 14
    assert {k: value["mean"] for k, value in report["pass_at"].items()} == {"1": 0.5, "2": 1.0}
    assert list(report["components"]) == ["env", "form"]
    assert report["failures"] == [{"cause": "ValueError", "episodes": 2, "example": "ValueError: boom"}]
    assert [(one["tag"], one["tasks"], one["failed"]) for one in report["by_tag"]] == [("high", 3, 2), ("low", 4, 0)]
    assert [one["once"]["mean"] for one in report["by_tag"]] == [0.5, 0.5]


def test_the_page_of_a_check_has_the_mean_of_each_pass_and_the_verdicts(tmp_path: Path) -> None:
    found = page(make_judged(tmp_path))["senses"]
    told = {(one["condition"], one["kind"]): one for one in found["passes"]}
    assert told["as it is", "all"]["reward"] == 1.0 and told["as it is", "all"]["change"] is None
    assert told["blanked", "image"]["reward"] == 0.25
    assert told["blanked", "image"]["change"]["mean"] == pytest.approx(-0.75)
    assert found["verdicts"]["image"]["what"].startswith("used") and found["verdicts"]["audio"]["what"].startswith("not used")


def test_the_newest_check_in_or_below_the_folder_of_a_run_counts_and_is_read_again(tmp_path: Path) -> None:
    folder, measured = make_judged(tmp_path), Measured()
    (folder / "again").mkdir()
    save(senses(), folder / "again")
    os.utime(folder / "again" / "senses.json", (1.0, 1.0))
    first = measured.senses(folder)
    assert first is not None and first["env"] == "omni-v0"
    text = (folder / "senses.json").read_text()
    (folder / "senses.json").write_text(text.replace("omni-v0", "newer-v0"))
    changed = measured.senses(folder)
    assert changed is not None and changed["env"] == "newer-v0"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"episodes": 3}', '{"passes": [{}], "changes": null}'])
def test_files_that_are_no_reports_are_none(tmp_path: Path, text: str) -> None:
    for name in ("report.json", "senses.json"):
        (tmp_path / name).write_text(text)
    assert Measured().report(tmp_path) is None
    assert Measured().senses(tmp_path) is None

"""A run that is asked to checks at its end whether the policy uses what it is shown."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from local_runs import SMALL, Watch, trainer
from relax_server.models.catalog import resolve_model
from relax_server.roles.events import read_events
from relax_server.roles.local import LocalRuntime
from relax_server.roles.senses_at_end import check_senses_at_end

import relax_sdk as relax
from relax_sdk.doctor import senses_findings
from relax_sdk.errors import RunError
from relax_sdk.runtime import Job


def done(folder: Path, check_senses: bool = True) -> Job:
    """A run of `tone-v0` whose weights are those that it would begin with."""
    made = relax.Trainer("tone-v0", eval={"check_senses": check_senses, "limit": 8})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(made.config.to_dict()))
    shutil.copytree(resolve_model(made.config.model), folder / "hf")
    return Job(made.spec, made.config, folder)


def test_the_verdicts_are_in_the_run_s_folder_and_its_events(tmp_path: Path):
    job, watch = done(tmp_path / "run"), Watch(lambda step: None)
    found = check_senses_at_end(job, watch, LocalRuntime().play_senses)
    assert [finding.what.partition(":")[0] for finding in found] == ["audio"] and found == senses_findings(job.folder)
    events = [event for event in read_events(job.folder / "events.jsonl") if event["kind"] == "finding"]
    assert [(e["what"], e["level"], e["advice"]) for e in events] == [(found[0].what, found[0].level, found[0].advice)]
    kept = json.loads((job.folder / "senses" / "senses.json").read_text())
    assert kept["tasks"] == 8 and (job.folder / "senses" / "senses.md").exists() and not watch.warnings


def test_nothing_is_played_where_nobody_asks(tmp_path: Path):
    job = done(tmp_path / "run", check_senses=False)
    assert check_senses_at_end(job, Watch(lambda step: None), LocalRuntime().play_senses) == []
    assert not (job.folder / "senses").exists() and not (job.folder / "events.jsonl").exists()


def test_a_check_that_fails_is_told_and_the_run_is_done_all_the_same(tmp_path: Path):
    job, watch = done(tmp_path / "run"), Watch(lambda step: None)

    def play(*_: object) -> None:
        raise RunError("no episode was usable")

    assert check_senses_at_end(job, watch, play) == []  # type: ignore[arg-type]
    (event,) = read_events(job.folder / "events.jsonl")
    assert (event["kind"], event["level"]) == ("warning", "note") and watch.warnings == [event["what"]]
    assert "no episode was usable" in event["what"] and f"relax check-senses {job.folder}" in event["what"]


@pytest.mark.nightly
def test_the_verdict_is_the_last_word_of_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = trainer(tmp_path / "run", eval=SMALL["eval"] | {"check_senses": True}).fit(steps=1)
    (found,) = senses_findings(run.folder)
    assert capsys.readouterr().err.splitlines()[-1] == f"senses, {found.sentence}"
    assert found.what in [event["what"] for event in read_events(run.folder / "events.jsonl")]

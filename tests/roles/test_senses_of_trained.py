"""The blindness check passes the shipped environments, with the models that are trained in them, and names planted faults."""

from __future__ import annotations

from pathlib import Path

import pytest

import relax_sdk as relax
from benchmarks.senses import FAULTS, Case, check, register, right


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("env", ["tone-v0", "colour-v0", "motion-v0", "omni-quiz-v0", "higher-lower-v0"])
def test_a_trained_model_uses_what_it_is_shown(env: str, tmp_path: Path):
    run = relax.Trainer(env, folder=tmp_path / "run").fit(progress=False)
    report = relax.check_senses(run.folder, limit=96, out=tmp_path / "senses", progress=False)
    assert report.ok and set(report.verdicts) == relax.get_spec(env).load().modalities, report
    assert all(verdict.what.startswith("used: ") for verdict in report.verdicts.values()), report


@pytest.fixture(scope="module")
def planted() -> None:
    register()


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.env)
def test_a_planted_fault_is_named(case: Case, tmp_path: Path):
    report, _ = check(case, tmp_path)
    assert right(case, report), report

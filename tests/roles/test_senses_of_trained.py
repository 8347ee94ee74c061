"""The blindness check passes the shipped environments, with the models that are trained in them."""

from __future__ import annotations

from pathlib import Path

import pytest

import relax_sdk as relax


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("env", ["tone-v0", "colour-v0", "motion-v0", "omni-quiz-v0", "higher-lower-v0"])
def test_a_trained_model_uses_what_it_is_shown(env: str, tmp_path: Path):
    run = relax.Trainer(env, folder=tmp_path / "run").fit(progress=False)
    report = relax.check_senses(run.folder, limit=96, out=tmp_path / "senses", progress=False)
    assert report.ok and set(report.verdicts) == relax.get_spec(env).load().modalities, report
    assert all(verdict.what.startswith("used: ") for verdict in report.verdicts.values()), report

"""What is told of settings before a run begins."""

from __future__ import annotations

import pytest
from relax_server.roles.checks import algorithm_notes

import relax_sdk as relax
from relax_sdk.config import AlgorithmConfig, RunConfig


@pytest.mark.parametrize(
    ("staleness", "settings", "told"),
    [
        (1, {"old_logprobs": "recompute"}, True),
        (0, {"old_logprobs": "recompute"}, False),
        (4, {"old_logprobs": "recompute", "updates_per_batch": 2}, False),
        (1, {}, False),
    ],
)
def test_a_ratio_that_is_one_by_definition_is_told(staleness: int, settings: dict, told: bool) -> None:
    notes = algorithm_notes(RunConfig("tone-v0", max_staleness=staleness, algorithm=AlgorithmConfig(**settings)))
    assert bool(notes) is told
    assert all("clip_low" in note and "tis_clip" in note for note in notes)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_engine_that_is_not_installed_is_told_before_anything_is_started(tmp_path, monkeypatch, engine):
    monkeypatch.setenv(f"RELAX_{engine.upper()}_PYTHON", str(tmp_path / "nothing"))
    with pytest.raises(relax.ConfigError, match=f"no interpreter at .*RELAX_{engine.upper()}_PYTHON"):
        relax.Trainer("tone-v0", engine=engine, folder=tmp_path / "run").fit(steps=1, progress=False)
    assert not (tmp_path / "run" / "logs").exists()


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_films_with_sound_are_refused_for_engines_that_do_not_hear_them(tmp_path, monkeypatch, engine):
    monkeypatch.setattr("relax_server.roles.local.check_engine", lambda config: None)
    with pytest.raises(relax.ConfigError, match=f"use_audio_in_video = True: engine='{engine}' does not hear films here"):
        relax.Trainer("motion-v0", engine=engine, media={"use_audio_in_video": True}, folder=tmp_path / "run").fit(
            steps=1, progress=False
        )
    assert not (tmp_path / "run" / "logs" / "rollout.log").exists()

"""An evaluation with an engine of its own, of a run's weights and of a model folder."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path

import pytest
from relax_server.models.catalog import resolve_model
from relax_server.roles.layout import RunLayout
from relax_server.roles.replay import read_episode

import relax_sdk as relax
from relax_sdk.errors import ConfigError
from relax_sdk.origin import keep_origin
from relax_sdk.run import read_config


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run of `tone-v0` that was never trained: its weights are those that it would begin with."""
    folder = tmp_path / "tone"
    trainer = relax.Trainer("tone-v0", sampling={"max_new_tokens": 2})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(trainer.config.to_dict()))
    keep_origin(trainer.spec, None, folder)
    shutil.copytree(resolve_model(trainer.config.model), folder / "hf")
    return folder


def test_a_run_s_weights_are_played_and_its_folder_stays_as_it_is(
    run_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    before = sorted(path.name for path in run_folder.iterdir())
    found = relax.evaluate(run_folder, limit=3, samples=2, out=tmp_path / "out", progress=False)
    assert (found.model, found.of, len(found.episodes), found.complete) == ("tone", 3, 6, True)
    assert set(found.scores.pass_at) == {1, 2} and all(e.tokens in (1, 2) for e in found.episodes)
    assert sorted(path.name for path in run_folder.iterdir()) == before
    layout = RunLayout(tmp_path / "out")
    recorded = read_episode(read_config(layout.folder), layout, "eval/100/1/0")
    assert recorded.split == "eval" and recorded.turns[0].response_ids and recorded.turns[0].sampling is not None
    assert relax.MediaStore(layout.media).get(recorded.turns[0].media[0])
    again = relax.evaluate(run_folder, limit=3, samples=2, out=tmp_path / "out", progress=False)
    assert again.episodes == found.episodes
    gc.collect()
    assert not [line for line in caplog.messages if "Unclosed" in line]


def test_what_cannot_be_played_is_said_before_an_engine_starts(run_folder: Path, tmp_path: Path):
    shutil.rmtree(run_folder / "hf")
    with pytest.raises(ConfigError, match="no trained weights yet"):
        relax.evaluate(run_folder, out=tmp_path / "out")
    with pytest.raises(ConfigError, match="no 'test' split"):
        relax.evaluate("tone-v0", split="test", out=tmp_path / "out")
    with pytest.raises(ConfigError, match="goes with the folder of a run"):
        relax.evaluate("tone-v0", env="colour-v0", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()

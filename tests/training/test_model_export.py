"""`relax export RUN`: any kept checkpoint as a model folder, with the weights that the policy had at that step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_server.models.weight_files import INDEX, read_weights
from relax_server.roles.layout import RunLayout
from relax_server.roles.model_export import find_checkpoint
from training_data import make_policy, parameters, read
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import relax_sdk as relax
from relax_sdk import CheckpointError, ConfigError, export_model
from relax_sdk.config import RunConfig, TrainingConfig
from relax_sdk.looking_cli import app
from relax_sdk.model_export import parse_size
from relax_sdk.run import CONFIG

MODEL = "relax/tiny-llama"


def trained(folder: Path) -> list[dict[str, np.ndarray]]:
    """A policy's weights at two checkpoints."""
    from training_data import letter_groups

    policy = make_policy(MODEL)
    kept = []
    for step in (1, 2):
        policy.train_step(letter_groups(policy.processor, 1, 2, seed=step), read, step - 1)
        policy.save(folder / "checkpoints" / f"step_{step:06}", {"step": step})
        kept.append(parameters(policy))
    return kept


@pytest.fixture(scope="module")
def run(worker, tmp_path_factory) -> tuple[Path, list[dict[str, np.ndarray]]]:
    """A run folder with two checkpoints, and the weights in them."""
    folder = tmp_path_factory.mktemp("runs") / "tone"
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(RunConfig(env="tone-v0", model=MODEL).to_dict()))
    return folder, worker.run(trained, folder)


def exported(*arguments: Any) -> str:
    done = CliRunner().invoke(app, ["export", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_an_earlier_checkpoint_in_shards(run, tmp_path):
    folder, weights = run
    said = exported(folder, "--to", tmp_path / "out", "--checkpoint", 1, "--shard-size", "500KB")
    assert "the model after 1 steps" in said and "files" in said
    found = read_weights(tmp_path / "out")
    assert found.keys() == weights[0].keys() and (tmp_path / "out" / INDEX).exists()
    assert all(np.array_equal(tensor.numpy(), weights[0][name]) for name, tensor in found.items())
    assert any(not np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(np.array_equal(loaded[name].numpy(), array) for name, array in weights[0].items())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_a_run_that_attends_as_a_gpu_does_is_exported_on_a_cpu(run, tmp_path):
    folder, weights = run
    on_gpu = tmp_path / "run"
    on_gpu.mkdir()
    (on_gpu / "checkpoints").symlink_to(folder / "checkpoints")
    config = RunConfig(env="tone-v0", model=MODEL, training=TrainingConfig(attention="flex", experts="grouped"))
    (on_gpu / CONFIG).write_text(json.dumps(config.to_dict()))
    exported(on_gpu, "--to", tmp_path / "out")
    found = read_weights(tmp_path / "out")
    assert all(np.array_equal(tensor.numpy(), weights[1][name]) for name, tensor in found.items())


def test_the_last_checkpoint_is_what_nobody_asked_for(run):
    layout = RunLayout(run[0])
    assert find_checkpoint(layout, None) == find_checkpoint(layout, 2) == layout.checkpoint(2)


def test_a_damaged_checkpoint_is_refused_by_name(run, tmp_path, monkeypatch, capsys):
    folder, _ = run
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / CONFIG).write_text((folder / CONFIG).read_text())
    broken = tmp_path / "run" / "checkpoints" / "step_000001"
    broken.mkdir()
    for file in (folder / "checkpoints" / "step_000001").iterdir():
        data = file.read_bytes()
        (broken / file.name).write_bytes(data[:-1] if file.name.endswith(".distcp") else data)
    monkeypatch.setattr("relax_sdk.progress.TICK", 0.001)
    with pytest.raises(CheckpointError, match=r"damaged: \S+\.distcp has \d+ bytes"):
        export_model(tmp_path / "run", tmp_path / "out")
    assert "writing the model of run · " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported_is_said_at_once(run, tmp_path):
    folder, _ = run
    with pytest.raises(ConfigError, match=r"has no checkpoint of step 7; it has: 1, 2\. More are kept with"):
        export_model(folder, tmp_path / "out", checkpoint=7)
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "a").touch()
    with pytest.raises(ConfigError, match="holds something"):
        export_model(folder, tmp_path / "held")
    with pytest.raises(ConfigError, match="not a run folder"):
        export_model(tmp_path, tmp_path / "out")
    (tmp_path / CONFIG).write_text((folder / CONFIG).read_text())
    with pytest.raises(ConfigError, match="no checkpoint yet"):
        relax.export_model(tmp_path, tmp_path / "out")


def test_both_exports_are_found_by_their_help():
    for arguments, words in ((["--help"], "--checkpoint"), (["trajectories", "--help"], "--format")):
        done = CliRunner().invoke(app, ["export", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
        assert done.exit_code == 0 and words in done.output


@pytest.mark.parametrize(("text", "size"), [("2GB", 2 * 10**9), ("500 MiB", 500 << 20), ("1.5kb", 1500), (7, 7), ("64", 64)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0", "-1", "2 apples", 0])
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match=r"shard_size = .*such as 2GB"):
        parse_size(text)

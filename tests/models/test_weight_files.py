"""Trainer and engines read the same weights of a folder: those that its index names, as transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from relax_server.engines.weight_shapes import WeightShapes
from relax_server.models.catalog import resolve_model
from relax_server.models.weight_files import read_shapes, read_weights, weight_files
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from relax_sdk import ConfigError
from relax_sdk.errors import EngineError


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A tiny Llama in three shards, beside a stale shard of other weights that the index does not name."""
    source = resolve_model("relax/tiny-llama")
    model = AutoModelForCausalLM.from_pretrained(source)
    model.save_pretrained(tmp_path, max_shard_size="1MB")
    assert len(weight_files(tmp_path)) >= 2
    stale = {name: tensor + 1 for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(stale, tmp_path / "model-99999-of-99999.safetensors", metadata={"format": "pt"})
    save_file({"lora.weight": torch.zeros(3)}, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_the_index_decides_and_not_what_else_is_there(sharded):
    expected = load_file(resolve_model("relax/tiny-llama") / "model.safetensors")
    found = read_weights(sharded)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert read_shapes(sharded) == {name: list(tensor.shape) for name, tensor in expected.items()}
    WeightShapes.of(sharded).check(read_shapes(sharded), "the same folder")


def test_transformers_reads_the_same(sharded):
    loaded = AutoModelForCausalLM.from_pretrained(sharded).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in read_weights(sharded).items())


def test_a_missing_shard_is_named(sharded):
    gone = weight_files(sharded)[1]
    gone.unlink()
    for read in (read_weights, read_shapes):
        with pytest.raises(ConfigError, match=rf"names {gone.name}, which is missing"):
            read(sharded)
    with pytest.raises(EngineError, match=gone.name):
        WeightShapes.of(sharded)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {}}'])
def test_an_index_that_cannot_be_read_is_named(text, sharded):
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json"):
        weight_files(sharded)


def test_one_file_comes_before_an_index(sharded):
    """As in transformers: what was exported into a folder that had shards is what is read."""
    save_file({"a": torch.ones(2, dtype=torch.bfloat16)}, sharded / "model.safetensors", metadata={"format": "pt"})
    assert weight_files(sharded) == [sharded / "model.safetensors"]
    assert read_shapes(sharded) == {"a": [2]} and read_weights(sharded)["a"].dtype == torch.bfloat16


def test_a_folder_without_weights_and_a_damaged_file_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        read_weights(tmp_path)
    save_file({"a": torch.zeros(100)}, tmp_path / "model.safetensors")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    for read in (read_weights, read_shapes):
        with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read"):
            read(tmp_path)


def test_shapes_are_read_without_torch(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from relax_server.models.weight_files import read_shapes; "
        "assert read_shapes(Path(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(resolve_model("relax/tiny-llama"))], check=True, timeout=60)

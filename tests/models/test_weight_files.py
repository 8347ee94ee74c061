"""Trainer and engines read the same weights of a folder: those that its index names, as transformers does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from relax_server.engines.weight_shapes import WeightShapes
from relax_server.models.catalog import resolve_model
from relax_server.models.weight_files import INDEX, FolderWeights, read_shapes, read_weights, weight_files
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


def test_slices_are_those_of_the_whole_tensor(sharded):
    weights, whole = FolderWeights(sharded), load_file(resolve_model("relax/tiny-llama") / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj.weight"
    rows, columns = weights.shapes[name]
    for at in ((slice(3, 7),), (slice(0, rows), slice(columns // 2, columns)), (slice(5, 5),), ()):
        assert torch.equal(weights.read(name, at), whole[name][at])
    assert weights.dtypes[name] == "F32" and weights.files[name].parent == sharded


@pytest.mark.parametrize("at", [(slice(0, 10**6),), (slice(-1, 3),), (slice(4, 3),), (slice(0, 1),) * 3])
def test_a_slice_outside_of_a_tensor_is_refused(at, sharded):
    """safetensors itself gives what there is of it."""
    name = "model.layers.0.mlp.gate_proj.weight"
    with pytest.raises(ConfigError, match=rf"safetensors: tensor {re.escape(name)} has shape \[.*was asked of it"):
        FolderWeights(sharded).read(name, at)


def test_a_tensor_that_no_file_holds_is_named(sharded):
    with pytest.raises(ConfigError, match=r"no file holds the tensor model\.nothing; download or export"):
        FolderWeights(sharded).read("model.nothing")
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.nothing"] = next(iter(index["weight_map"].values()))
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"says that model-0000\S+ holds model\.nothing, and it does not; download"):
        FolderWeights(sharded)


@pytest.mark.parametrize("outside", ["../other/model.safetensors", "/etc/passwd", "a/../../b.safetensors"])
def test_an_index_cannot_lead_out_of_its_folder(outside, sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = outside
    (sharded / INDEX).write_text(json.dumps(index))
    for read in (read_weights, read_shapes, weight_files):
        with pytest.raises(ConfigError, match=rf"lm_head\.weight is in '{re.escape(outside)}', outside of the folder"):
            read(sharded)


def test_a_shard_that_was_cut_short_is_named(sharded):
    cut = weight_files(sharded)[1]
    cut.write_bytes(cut.read_bytes()[:-1000])
    for read in (read_weights, FolderWeights):
        with pytest.raises(ConfigError, match=rf"{cut.name}: cannot be read .*damaged or cut short: download or export"):
            read(sharded)


def test_a_folder_is_read_without_being_held(tmp_path):
    def status(name: str) -> float:
        return int(re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1024

    save_file({f"{i:02}": torch.ones(4 << 20, dtype=torch.uint8) for i in range(32)}, tmp_path / "model.safetensors")
    weights = FolderWeights(tmp_path, mapped=16 << 20)
    weights.read("00")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    assert all(bool(weights.read(name).all()) for name in weights.files)
    grown = status("VmHWM") - before
    assert grown < 16 + 2 * 4 + 8, f"{grown:.0f} MiB more, for a folder of 128 MiB whose largest tensor has 4"

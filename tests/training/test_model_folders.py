"""Model folders in shards: written whole or not at all, read back by transformers, and by tensor-parallel ranks in parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from relax_server.models.catalog import resolve_model
from relax_server.models.weight_files import INDEX, FolderWeights
from training_data import TINY, large_omni, make_policy, small_model

from relax_sdk import ConfigError, DiskFull

MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1, mlp_only_layers=[1])
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": dict(tie_word_embeddings=True),
    "Qwen3": dict(head_dim=16),
    "Qwen3Moe": dict(head_dim=16) | MOE,
}


def model_of(folder: Path, kind: str) -> Path:
    return large_omni(folder) if kind == "omni" else small_model(folder, kind, **KINDS[kind])


def load(path: Path) -> Any:
    from relax_server.training.megatron import parallel

    parallel.initialize(seed=0)
    from relax_server.training.megatron.build import load_model
    from transformers import AutoConfig

    return load_model(path, AutoConfig.from_pretrained(path))


# -------------------------------------------------------------------------------------------------------- out and in again


def written_and_read(path: Path, to: Path, shard_size: int) -> dict[str, Any]:
    """Write a model in shards; load that with transformers and with Megatron."""
    import torch
    from relax_server.training.megatron.folder import write_folder
    from transformers import AutoModelForCausalLM, Qwen3OmniMoeThinkerForConditionalGeneration

    loaded = load(path)
    files = write_folder(path, loaded.hf_weights(), to, shard_size)
    omni = loaded.hf_config.model_type == "qwen3_omni_moe_thinker"
    cls: Any = Qwen3OmniMoeThinkerForConditionalGeneration if omni else AutoModelForCausalLM
    ids = torch.arange(40)[None] % TINY["vocab_size"]
    with torch.no_grad():
        logits = [cls.from_pretrained(p).eval()(input_ids=ids).logits for p in (path, to)]
    again = load(to).hf_weights()
    return {
        "files": files,
        "logits": torch.equal(*logits),
        "weights": all(torch.equal(tensor, again[name]) for name, tensor in loaded.hf_weights().items()),
    }


@pytest.mark.parametrize("kind", [*KINDS, "omni"])
def test_transformers_reads_the_same_model_from_shards(worker, tmp_path, kind):
    path = model_of(tmp_path / "model", kind)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_text("of another model, which goes away")
    got = worker.run(written_and_read, path, tmp_path / "out", 200_000)
    assert got["logits"] and got["weights"]
    assert len(got["files"]) > 2
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    weights = FolderWeights(tmp_path / "out")
    sizes = {f: (tmp_path / "out" / f).stat().st_size for f in got["files"]}
    assert set(index["weight_map"].values()) == set(sizes) and set(index["weight_map"]) == set(weights.shapes)
    heads = sum(int.from_bytes((tmp_path / "out" / f).read_bytes()[:8], "little") + 8 for f in sizes)
    assert index["metadata"]["total_size"] == sum(sizes.values()) - heads
    tensors = {f: [n for n, at in weights.files.items() if at.name == f] for f in sizes}
    assert all(size < 300_000 or len(tensors[f]) == 1 for f, size in sizes.items())
    rest = {f.name for f in (tmp_path / "out").iterdir()} - {INDEX, *sizes}
    assert rest == {f.name for f in path.iterdir()} - {"model.safetensors"}
    assert sorted(f.name for f in tmp_path.iterdir()) == ["model", "out"]


def made_elsewhere(path: Path) -> tuple[set[str], list[str], bool]:
    """Devices of the parameters of a model that is made elsewhere, tensors made on the CPU, and whether any was drawn."""
    import torch
    from relax_server.models.families import trained_part
    from relax_server.training.megatron import parallel
    from relax_server.training.megatron.build import build_model
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import AutoConfig

    on_cpu: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.device.type == "cpu" and made.numel() > 1000:
                on_cpu.append(f"{func} {tuple(made.shape)}")
            return made

    parallel.initialize(seed=0)
    config, before = trained_part(AutoConfig.from_pretrained(path)), torch.get_rng_state()
    with Watch():
        model = build_model(config, dtype=torch.bfloat16, device=torch.device("meta"), recompute=False)
    return {p.device.type for p in model.parameters()}, on_cpu, not torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", ["relax/tiny-llama", "relax/tiny-omni"])
def test_a_model_is_made_on_its_device_and_no_weight_is_drawn(worker, kind):
    assert worker.run(made_elsewhere, resolve_model(kind)) == ({"meta"}, [], False)


def mixed_dtypes(folder: Path) -> bool:
    import torch
    from relax_server.models.weight_files import read_weights
    from relax_server.training.megatron.folder import write_weights

    weights = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "half": torch.arange(5).to(torch.bfloat16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.zeros(0, 3),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "flags": torch.tensor([True, False]),
    }
    write_weights(weights, folder)
    return all(torch.equal(tensor, weights[name]) for name, tensor in read_weights(folder).items())


def test_tensors_of_all_dtypes_are_whole(worker, tmp_path):
    assert worker.run(mixed_dtypes, tmp_path)


# ---------------------------------------------------------------------------------------------- parts of tensor parallelism


def parts_against_whole(path: Path, size: int) -> list[str]:
    """Parameters whose parts, read by each rank, are not those that Megatron would cut from the whole."""
    import torch
    from relax_server.training.megatron.place import Place

    loaded, weights = load(path), FolderWeights(path)
    parameters = dict(loaded.model.named_parameters())
    places = [Place(range(0), tensor=(rank, size), expert_tensor=(rank, size)) for rank in range(size)]
    wrong = []
    for link in loaded.links:
        read = [link.read(weights, place) for place in places]
        for number, name in enumerate(link.megatron):
            whole = parameters[name].detach()
            if not link.cuts:
                expected = [whole] * size
            else:
                dim = 1 if "linear_proj" in name or "linear_fc2" in name else 0
                stride = 2 if "linear_fc1" in name else 1
                blocks = [block.chunk(size, dim) for block in whole.chunk(stride, dim)]
                expected = [torch.cat([block[rank] for block in blocks], dim) for rank in range(size)]
            if not all(torch.equal(parts[number], e) for parts, e in zip(read, expected, strict=True)):
                wrong.append(name)
        mine = {name: read[0][number] for number, name in enumerate(link.megatron)}
        wrong += [name for name, tensor in link.whole(mine, places[0]).items() if [*tensor.shape] != weights.shapes[name]]
    return wrong


@pytest.mark.parametrize("kind", [*KINDS, "omni"])
def test_each_tensor_parallel_rank_reads_its_part(worker, tmp_path, kind):
    assert worker.run(parts_against_whole, model_of(tmp_path, kind), 2) == []


def fused_experts(path: Path, fused: Path, size: int) -> list[str]:
    """The same, of a folder whose experts are fused, as transformers holds them in memory."""
    import shutil

    from relax_server.training.megatron.folder import write_weights
    from transformers import AutoModelForCausalLM

    fused.mkdir()
    shutil.copy(path / "config.json", fused)
    write_weights(AutoModelForCausalLM.from_pretrained(path).state_dict(), fused)
    assert "model.layers.0.mlp.experts.gate_up_proj" in FolderWeights(fused).shapes
    return parts_against_whole(fused, size)


def test_fused_experts_are_read_in_parts(worker, tmp_path):
    assert worker.run(fused_experts, model_of(tmp_path / "model", "Qwen3Moe"), tmp_path / "fused", 2) == []


def test_a_tensor_that_cannot_be_divided_is_refused(worker, tmp_path):
    with pytest.raises(ConfigError, match=r"64 of shape \[64, 64\] cannot be divided by 3 tensor ranks"):
        worker.run(parts_against_whole, model_of(tmp_path, "Llama"), 3)


# ------------------------------------------------------------------------------------------------------- killed, or no room

WRITER = """
import sys, time
from pathlib import Path
import torch
from relax_server.training.megatron.folder import write_folder

class Slow(dict):
    asked = 0

    def __getitem__(self, name):
        self.asked += 1
        if self.asked > len(self) + 3:  # of each file the size was asked, and some of them are written
            print("now", flush=True)
            time.sleep(60)
        return super().__getitem__(name)

tensors = Slow({f"{i}": torch.zeros(1000) for i in range(8)})
write_folder(Path(sys.argv[1]), tensors, Path(sys.argv[3]), 4000)
"""


@pytest.mark.parametrize("before", [True, False])
def test_a_killed_write_leaves_no_folder_that_looks_whole(tmp_path, before):
    source, to, partial = resolve_model("relax/tiny-llama"), tmp_path / "out", tmp_path / ".out.partial"
    if before:
        to.mkdir()
        (to / "config.json").write_text("of the model before")
    command = [sys.executable, "-c", WRITER, str(source), str(partial), str(to)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        assert writer.stdout is not None and writer.stdout.readline() == b"now\n"
        os.kill(writer.pid, signal.SIGKILL)
    finally:
        writer.kill()
        writer.wait(30)
    assert to.exists() == before and (not before or [f.name for f in to.iterdir()] == ["config.json"])
    with pytest.raises(ConfigError, match="neither"):
        FolderWeights(partial)


def without_room(folder: Path) -> list[str]:
    import shutil

    from relax_server.training.megatron.folder import write_folder, write_weights

    policy = make_policy("relax/tiny-llama")
    usage, said = shutil.disk_usage, []
    shutil.disk_usage = lambda path: usage(path)._replace(free=5_000)  # type: ignore[assignment]
    try:
        for write in (
            lambda: write_folder(policy.model_path, policy._loaded.hf_weights(), folder / "out"),
            lambda: write_weights(policy._loaded.hf_weights(), folder / "weights"),
        ):
            try:
                write()
            except DiskFull as error:
                said.append(str(error))
    finally:
        shutil.disk_usage = usage
    return said


def test_room_is_checked_before_a_folder_is_written(worker, tmp_path):
    said = worker.run(without_room, tmp_path)
    assert len(said) == 2 and all("bytes (" in s and "5000 bytes (0.0 MB) are free; make room there" in s for s in said)
    assert not [f for f in tmp_path.rglob("*") if f.is_file()]

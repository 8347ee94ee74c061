"""How much memory does a trainer need above its model's own while a model folder is read and written?

    python -m benchmarks.folders [--layers 12]

The model is a randomly initialised Qwen3 in float32, 0.38 GB with 12 layers. Its folder is read into a Megatron model, written
in one file and in shards, and read from these shards, each way in a process of its own. *Above the model* is the peak of
the resident memory, pages of mapped files included, above what the process held when the model was there. The bar: no more than
the largest tensor twice (where it is joined or split) and what a reader may have mapped at a time.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import save

SHARD = 100_000_000
"""Bytes of a shard at most."""
LIMIT = 600.0
"""Seconds for one way."""
SLACK_MB = 10.0
"""For what Python, and the allocator, take beside tensors."""


def resident(name: str) -> float:
    """`VmRSS` or `VmHWM` of this process in MB."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 / 1e6 if found else float("nan")


def make(folder: Path, layers: int) -> None:
    """Write the model as transformers does."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = dict(
        hidden_size=768, intermediate_size=2304, num_attention_heads=12, num_key_value_heads=4, head_dim=64
    )
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=16_384, num_hidden_layers=layers, tie_word_embeddings=True, **shape)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def measure(way: str, source: Path, to: Path) -> dict[str, Any]:
    """One way, in this process."""
    import torch
    from relax_server.models.weight_files import FolderWeights
    from relax_server.training.megatron import build, hf, parallel
    from relax_server.training.megatron.folder import write_folder
    from transformers import AutoConfig

    parallel.initialize(seed=0)
    config = AutoConfig.from_pretrained(source)
    model = build.build_model(config, dtype=torch.float32, device=torch.device("cpu"), recompute=False)
    weights = FolderWeights(source)
    links = hf.model_links(config, hf.TensorNames.of(weights.shapes, str(source)), [n for n, _ in model.named_parameters()])
    whole = build.whole_model(model, links)
    loaded = build.Loaded(model, config, links, whole, weights)
    for parameter in model.parameters():  # memory that nobody has written to is not taken yet
        parameter.data.zero_()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = resident("VmRSS"), time.perf_counter()
    if way == "read":
        build.load_weights(model, links, weights, whole)
    else:
        write_folder(source, loaded.hf_weights(), to, SHARD if way == "write in shards" else 10 * SHARD)
    sizes = [parameter.nbytes / 1e6 for parameter in model.parameters()]
    return {
        "model_mb": sum(sizes),
        "largest_tensor_mb": max(sizes),
        "above_the_model_mb": resident("VmHWM") - before,
        "seconds": time.perf_counter() - began,
    }


def row(way: str, source: Path, to: Path) -> dict[str, Any]:
    """One way in a process of its own."""
    from relax_server.models.weight_files import MAPPED, weight_files

    kind = way.split(" from")[0]
    command = [sys.executable, "-m", "benchmarks.folders", "--way", kind, "--source", str(source), "--to", str(to)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    bar = 2 * found["largest_tensor_mb"] + MAPPED / 1e6 + SLACK_MB
    files = len(weight_files(to if kind != "read" else source))
    return {"way": way, "files": files, **found, "bar_mb": bar, "met": found["above_the_model_mb"] <= bar}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--way")
    parser.add_argument("--source", type=Path)
    parser.add_argument("--to", type=Path)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.way, args.source, args.to)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        make(home / "model", args.layers)
        rows = [
            row("read from one file", home / "model", home),
            row("write in one file", home / "model", home / "one"),
            row("write in shards", home / "model", home / "shards"),
            row("read from shards", home / "shards", home),
        ]
    save("folders", rows, key="way", bars={"above the model": "twice the largest tensor, and 64 MiB mapped"})


if __name__ == "__main__":
    main()

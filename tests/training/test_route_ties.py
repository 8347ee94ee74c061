"""Where two experts are nearly tied, engine and trainer may take different ones; replaying the engine's routes mends it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from relax_server.engines.base import GenerateRequest
from relax_server.engines.http import HttpEngine
from relax_server.engines.process import EngineProcess
from relax_server.engines.settings import EngineSettings
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from training_data import make_policy, make_trajectory, make_turn, read

from relax_sdk.config import SamplingParams
from relax_sdk.messages import as_messages
from relax_sdk.trajectory import Group

MARGIN = 1e-5
LAYER = 1


def tied(folder: Path, ids: list[int]) -> tuple[Path, Path]:
    """The tiny model twice; at the first of `ids` the second-best and third-best experts of a layer are `MARGIN` apart, in
    either order."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Model

    source = resolve_model("relax/tiny-omni")
    model = Model.from_pretrained(source, dtype=torch.float32).eval()
    gate = model.model.language_model.layers[LAYER].mlp.gate
    seen: list[torch.Tensor] = []
    gate.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].detach().reshape(-1, inputs[0].shape[-1])))
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long))
    x = seen[0][0].double()
    weights = load_file(source / "model.safetensors")
    (name,) = [n for n in weights if n.endswith(f"layers.{LAYER}.mlp.gate.weight")]
    _, taken, left = (weights[name].double() @ x).topk(3).indices.tolist()
    folders = folder / "one", folder / "other"
    for path, margin in zip(folders, (MARGIN, -MARGIN), strict=True):
        shutil.copytree(source, path)
        gap = (weights[name][taken].double() - weights[name][left].double()) @ x
        row = weights[name].clone()
        row[left] += ((gap - margin) * x / (x @ x)).float()
        save_file(weights | {name: row}, path / "model.safetensors", metadata={"format": "pt"})
    return folders


def gap(folder: Path, prompt: list[int], answer: list[int], logprobs: list[float], routes: np.ndarray, replay: bool) -> float:
    """Largest difference that a training step reports."""
    policy = make_policy(folder, replay_routes=replay)
    turn = make_turn(prompt, answer, [], routed_experts=routes.tobytes(), routed_shape=list(routes.shape))
    turn.response_logprobs = logprobs
    group = Group("g", "e", 0, [make_trajectory([turn], 1.0, 0, size=1)])
    return policy.train_step([group], read, 0)["logprob_gap_max"]


async def test_replay_mends_a_tie_that_is_broken_differently(worker, tmp_path):
    processor = Processor.load(resolve_model("relax/tiny-omni"))
    ids = processor.render(as_messages("which tone?")).ids
    engines, trainers = tied(tmp_path, ids)
    process = EngineProcess(engines, tmp_path / "engine.log", EngineSettings(return_routed_experts=True))
    await process.start()
    client = HttpEngine(process.url, token=process.token)
    try:
        sampling = SamplingParams(max_new_tokens=16, ignore_eos=True)
        request = GenerateRequest(ids, sampling, return_routed_experts=True)
        (got,) = await client.generate(request, 60)
    finally:
        await client.close()
        await process.stop()
    assert got.routed_experts is not None and got.routed_shape is not None
    routes = np.frombuffer(got.routed_experts, np.int32).reshape(got.routed_shape)
    args = (trainers, got.prompt_ids, got.response_ids, got.logprobs, routes)
    apart, together = worker.run(gap, *args, False), worker.run(gap, *args, True)
    assert apart > 1e-4  # another expert for one token out of many
    assert together < 2e-5
    assert worker.run(gap, engines, *args[1:], False) == pytest.approx(0, abs=1e-5)

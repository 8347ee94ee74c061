"""The embedded engine on a GPU, as far as it can be seen without one: its tensors are on the device, and answers are the same.

Sounds are left out: their tower pads inside PyTorch's own code, which knows nothing of a pretended device.
"""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from pretended_gpu import pretended_gpu
from relax_server.engines.embedded import model
from relax_server.engines.embedded.control import Control
from relax_server.engines.embedded.core import Prompt, Sequence
from relax_server.engines.embedded.prompts import PromptBuilder
from relax_server.engines.embedded.sampling import Sampling
from relax_server.engines.embedded.scheduler import Scheduler, SchedulerConfig
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from relax_server.models.weight_files import read_weights

from relax_sdk import Image, Message, Text


def test_tensors_of_two_devices_are_refused_by_the_pretended_gpu() -> None:
    with pretended_gpu() as device:
        there = torch.ones(2, 3).to(device)
        assert (there + torch.zeros(2, 3, device=device)).tolist() == [[1.0] * 3] * 2
        with pytest.raises(RuntimeError, match="same device"):
            there.add(torch.ones(2, 3))
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()


def prompts(processor: Processor, contents: list[tuple[Any, ...]]) -> list[Prompt]:
    """As the engine makes them of a request."""
    builder = PromptBuilder(processor, None)
    made = []
    for content in contents:
        media: dict[Any, list[str]] = {}
        for item in content:
            if not isinstance(item, Text):
                uri = f"data:{item.ref.mime};base64,{base64.b64encode(item.bytes()).decode()}"
                media.setdefault(item.kind, []).append(uri)
        made.append(asyncio.run(builder.build(processor.render([Message("user", content)]).ids, media)))
    builder.close()
    return made


def play(path: Path, processor: Processor, asked: list[Prompt]) -> list[tuple[list[int], list[float], Any]]:
    """Tokens, logprobs and routes of several prompts in a batch; weights are loaded once more while two are under way."""
    routes = "image" in processor.modalities
    runner = model.ModelRunner(path, processor.hf_config, torch.float32, routes)
    scheduler = Scheduler(
        runner, SchedulerConfig(capacity=2048, chunk=64, banned_ids=processor.banned_ids, record_routes=routes)
    )
    samplings: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9, "top_k": 20},
        {"temperature": 0.0},
        {"logit_bias": {40: 2.0}, "top_logprobs": 3},
    ]
    sequences = []
    for i, item in enumerate(asked):
        sampling = Sampling(max_new_tokens=6, ignore_eos=True, **samplings[i])
        sequences.append(Sequence(f"r{i}", 0, item, sampling, i, lambda s: None, want_routes=routes))
    with torch.no_grad():
        for item in sequences[:2]:
            scheduler.add(item)
        for _ in range(3):
            scheduler.step()
        Control(scheduler).update_weights(read_weights(path), "1", False, False)
        for item in sequences[2:]:
            scheduler.add(item)
        while scheduler.has_work:
            scheduler.step()
    assert runner.text.embed_tokens.weight.device == runner.device == scheduler.pool.keys.device
    return [(item.out_ids, item.logprobs, item.routed_experts) for item in sequences]


@pytest.mark.parametrize("name", ["relax/tiny-omni", "relax/tiny-qwen3"])
def test_an_engine_on_a_gpu_answers_as_on_the_cpu(name: str) -> None:
    path = resolve_model(name)
    processor = Processor.load(path)
    contents: list[tuple[Any, ...]] = [(Text("one"),), (Text("one, and a longer question"),)]
    if "image" in processor.modalities:
        image = Image.from_array(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
        contents += [(image, Text("see")), (image, Text("and see"))]
    asked = prompts(processor, contents)
    wanted = play(path, processor, asked)
    with pretended_gpu() as device, mock.patch.object(model, "this_device", lambda dtype: device):
        found = play(path, processor, asked)
    for (ids, logprobs, experts), (ids_there, logprobs_there, experts_there) in zip(wanted, found, strict=True):
        assert len(ids) == 6 and ids_there == ids
        np.testing.assert_allclose(logprobs_there, logprobs, atol=1e-5)
        assert (experts is None) == ("image" not in processor.modalities)
        np.testing.assert_array_equal(experts_there, experts)

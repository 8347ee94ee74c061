"""An embedded engine that is sent adapters alone: its logprobs are those of the trainer that published them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from relax_server.engines.base import GenerateRequest, MediaItem
from relax_server.engines.http import HttpEngine
from relax_server.engines.process import EngineProcess
from relax_server.engines.settings import EngineSettings
from relax_server.models.adapter_files import ADAPTERS, Adapters, write_adapters
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from training_data import ITEMS, letter_groups, make_policy, make_sample, read

from relax_sdk import Message, Text
from relax_sdk.config import SamplingParams
from relax_sdk.errors import EngineError
from relax_sdk.media import MediaStore
from relax_sdk.tuning import TARGETS, LoraConfig, Tuning

MODEL = "relax/tiny-omni"
TUNING = Tuning(LoraConfig(rank=4, targets=TARGETS))
NAMES = ("image", "audio", "video")


def trained(folder: Path) -> None:
    policy = make_policy(MODEL, tuning=TUNING, lr=1e-2, publish_adapters=True)
    for version in (1, 2, 3):
        policy.train_step(letter_groups(policy.processor, seed=version), read, version)
        policy.export_weights(folder / f"v{version}")
        policy.save(folder / f"c{version}", {})


def trainers_logprobs(folder: Path, version: int, prompt: list[int], response: list[int]) -> np.ndarray:
    policy = make_policy(MODEL, tuning=TUNING, lr=1e-2)
    policy.load(folder / f"c{version}")
    mask = [0] * len(prompt) + [1] * len(response)
    return policy.logprobs([make_sample([*prompt, *response], mask, [ITEMS[name] for name in NAMES])], read)[0]


@pytest.mark.asyncio
async def test_logprobs_of_a_prompt_of_all_media_are_the_trainers_after_every_update(worker, tmp_path):
    worker.run(trained, tmp_path)
    store = MediaStore(tmp_path / "media")
    processor = Processor.load(resolve_model(MODEL))
    rendered = processor.render([Message("user", (*(ITEMS[name] for name in NAMES), Text("and?")))])
    items = tuple(MediaItem(m.ref, str(store.path(store.put(m)))) for m in rendered.media)
    request = GenerateRequest(rendered.ids, SamplingParams(max_new_tokens=16, ignore_eos=True), items)
    settings = EngineSettings(media_root=store.root, max_total_tokens=4096)
    process = EngineProcess(resolve_model(MODEL), tmp_path / "engine.log", settings)
    await process.start(timeout=120)
    engine = HttpEngine(process.url, token=process.token)
    try:
        last = None
        for version in (1, 2, 3, 2):
            if version == 3:  # as in colocate mode: the base weights are gone from memory, too
                await engine.pause("abort")
                await engine.release_memory()
                await engine.resume_memory()
            await engine.update_weights(str(tmp_path / f"v{version}"), version)
            await engine.resume()
            (answer,) = await engine.generate(request, 60)
            wanted = worker.run(trainers_logprobs, tmp_path, version, answer.prompt_ids, answer.response_ids)
            np.testing.assert_allclose(answer.logprobs, wanted, atol=1e-4)
            assert [span.version for span in answer.weight_versions] == [version]
            assert last is None or np.abs(np.array(answer.logprobs) - last).max() > 1e-3
            last = np.array(answer.logprobs)
        write_adapters(Adapters({}, {}, 1.0, "another"), tmp_path / "v9")
        with pytest.raises(EngineError, match="belong to other weights"):
            await engine.update_weights(str(tmp_path / "v9"), 9)
        published = (tmp_path / "v1" / ADAPTERS).stat().st_size
        assert published < sum(file.stat().st_size for file in resolve_model(MODEL).glob("*.safetensors")) / 8
    finally:
        await engine.close()
        await process.stop()

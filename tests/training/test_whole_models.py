"""Folders of whole omni models: the thinker is trained and served, and everything else comes out of an export as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_server.models.families import TABLE, Family
from relax_server.models.processor import Processor
from relax_server.models.weight_files import FolderWeights
from training_data import answer, every_token, features_of, hf_logits, letter_groups, make_policy, parameters, prompt, read
from whole_models import CLASSES, whole_model

WHOLE = [name for name, family in TABLE.items() if family.whole is not None]


@pytest.fixture(scope="module", params=WHOLE)
def family(request) -> Family:
    return TABLE[request.param]


@pytest.fixture(scope="module")
def folder(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_model(family, tmp_path_factory.mktemp("whole"))


def bits(tensor: Any) -> Any:
    """The bytes of a tensor: transformers leaves experts of the talker as the memory was, and NaN does not equal itself."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def trained_and_exported(path: Path, out: Path) -> dict[str, Any]:
    """Train one step on all media and export; compare what transformers then reads with the trainer."""
    import torch
    import transformers
    from relax_server.training.megatron.build import load_model

    policy = make_policy(path)
    processor: Processor = policy.processor
    before = parameters(policy)
    policy.train_step(letter_groups(processor), read, version=0)
    moved = parameters(policy)
    policy.export(out, 2_000_000)
    _, cls = CLASSES[processor.family.whole.model_type]
    thinker = getattr(transformers, cls).from_pretrained(out).thinker.eval()
    ids, media = prompt(processor, "image", "a", "audio", "b", "video", "?")
    sample = every_token(ids + answer(processor, "yes"), processor, media)
    logprobs = policy.logprobs([sample], read)[0]
    with torch.no_grad():
        logits = hf_logits(thinker, processor, sample.ids, features_of(processor, media)).float()
    logits[:, list(processor.banned_ids)] = -torch.inf
    wanted = logits[:-1].log_softmax(-1).gather(1, torch.tensor(sample.ids)[1:, None])[:, 0].numpy()
    again = load_model(out, processor.hf_config).hf_weights()
    return {
        "moved": max(float(np.abs(moved[n] - before[n]).max()) for n in before),
        "names": all(n.startswith("thinker.") for n in before),
        "logprobs": float(np.abs(logprobs - wanted[np.array(sample.loss_mask[1:], bool)]).max()),
        "again": all(np.array_equal(again[n].numpy(), moved[n]) for n in moved),
    }


def test_the_thinker_is_trained_and_the_rest_is_exported_as_it_was(worker, family, folder, tmp_path):
    found = worker.run(trained_and_exported, folder, tmp_path / "out")
    assert found["names"] and found["again"]
    assert found["moved"] > 1e-5
    assert found["logprobs"] < 1e-4
    before, after = FolderWeights(folder), FolderWeights(tmp_path / "out")
    assert before.shapes == after.shapes and before.dtypes == after.dtypes
    others = [name for name in before.files if not name.startswith("thinker.")]
    changed = [n for n in others if not (bits(before.read(n)) == bits(after.read(n))).all()]
    assert len(others) > 20 and not changed
    assert {f.name for f in folder.iterdir()} - {f.name for f in (tmp_path / "out").iterdir()} <= {
        f.name for f in folder.glob("model*")
    }


def test_the_embedded_engine_serves_the_thinker_of_a_whole_folder(family, folder):
    import torch
    from relax_server.engines.embedded import weights
    from relax_server.engines.embedded.model import ModelRunner
    from relax_server.models.catalog import resolve_model
    from relax_server.models.weight_files import read_weights

    processor = Processor.load(folder)
    runner = ModelRunner(folder, processor.hf_config, torch.float32, record_routes=False)
    alone = ModelRunner(resolve_model(family.tiny), processor.hf_config, torch.float32, record_routes=False)
    for name, parameter in alone.model.named_parameters():
        assert torch.equal(parameter, runner.model.get_parameter(name)), name
    covered = weights.assign(runner.model, read_weights(folder))
    assert sum(view.numel() for view, _ in covered) == sum(p.numel() for p in runner.model.parameters())

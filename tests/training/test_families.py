"""Every architecture of the table: the trainer's logits and gradients, and what it exports, are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from heard_films import heard_film
from relax_server.models.families import TABLE, family_of
from relax_server.models.processor import Processor
from training_data import ITEMS, answer, every_token, features_of, hf_logits, large_model, prompt, read, small_model

from relax_sdk import ConfigError

CASES: dict[str, list[str]] = {
    "text": ["hello"],
    "image": ["image", "what?"],
    "two images": ["image", "and", "image2", "differ?"],
    "video": ["video", "see"],
    "audio": ["audio", "hear"],
    "short sound": ["short", "hear"],
    "mixed": ["video", "a", "audio", "b", "image", "long", "image2", "and?"],
    "seen": ["image", "a", "video", "b", "image2", "and?"],
}
SOUNDS = {"audio", "long", "short"}


def cases_of(processor: Processor) -> dict[str, list[str]]:
    """The cases that a model takes."""
    kinds = processor.modalities
    names = SOUNDS | {"image", "image2", "video"}
    taken = {n for n in names if ("audio" if n in SOUNDS else n.rstrip("2")) in kinds}
    return {case: parts for case, parts in CASES.items() if names.intersection(parts) <= taken}


@pytest.fixture(scope="module", params=list(TABLE))
def folder(request, tmp_path_factory) -> Path:
    return large_model(TABLE[request.param], tmp_path_factory.mktemp("model"))


def compare(path: Path, out: Path) -> dict[str, Any]:
    """Differences of logits by case, of every gradient, and of the logits after an export; all relative to their scale."""
    import torch
    from relax_server.training.batch import make_batch, read_features
    from relax_server.training.forest import pack
    from relax_server.training.megatron import hf, parallel
    from relax_server.training.megatron.build import load_model
    from relax_server.training.megatron.folder import write_folder
    from relax_server.training.megatron.hf_weights import HfWeights

    parallel.initialize(seed=0)
    processor = Processor.load(path)
    family = processor.family
    loaded = load_model(path, processor.hf_config)
    theirs = family.model_class().from_pretrained(path).eval()
    cases = cases_of(processor)
    samples, features = [], []
    for parts in cases.values():
        ids, media = prompt(processor, *parts)
        samples.append(every_token(ids + answer(processor, "yes"), processor, media))
        features.append(features_of(processor, media))
    batch = make_batch(samples, processor, read_features(samples, processor, read))
    (forest,) = pack(batch, 100_000)
    found = loaded.model.predictions(loaded.model(loaded.model.micro_batch(forest)))
    rows = (found.hidden @ found.weight.t()).index_select(0, torch.from_numpy(forest.row))
    order = np.argsort(forest.entry)
    ours = rows.index_select(0, torch.from_numpy(order))
    expected = [hf_logits(theirs, processor, s.ids, f) for s, f in zip(samples, features, strict=True)]
    at = [torch.from_numpy(batch.trained.at[batch.trained.sample == i] - 1) for i in range(len(samples))]
    wanted = torch.cat([logits.index_select(0, rows) for logits, rows in zip(expected, at, strict=True)])
    scale = float(wanted.abs().max())
    logits = {
        case: float((ours - wanted)[torch.from_numpy(batch.trained.sample == i)].abs().max()) / scale
        for i, case in enumerate(cases)
    }
    pull = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    (ours.log_softmax(-1) * pull).sum().backward()
    (wanted.log_softmax(-1) * pull).sum().backward()
    own = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in loaded.model.named_parameters()}
    links = hf.model_links(
        loaded.hf_config,
        hf.TensorNames.of({k: t.shape for k, t in theirs.state_dict().items()}, "memory", family),
        [n for n, _ in loaded.model.named_parameters()],
    )
    mine, other = (
        HfWeights(links, own, loaded.model.place, loaded.whole),
        {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None},
    )
    largest = max(float(g.abs().max()) for g in other.values())
    gradients = {n: float((mine[n] - g).abs().max()) / largest for n, g in other.items()}
    write_folder(path, loaded.folder_weights(), out)
    again = family.model_class().from_pretrained(out).eval()
    with torch.no_grad():
        exported = torch.equal(
            hf_logits(again, processor, samples[-1].ids, features[-1]),
            hf_logits(theirs, processor, samples[-1].ids, features[-1]),
        )
    moved = {n.split(".")[0] for n, g in own.items() if float(g.abs().max()) > 0}
    return {
        "logits": logits,
        "gradients": gradients,
        "scale": scale,
        "exported": exported,
        "moved": moved,
        "media": len(forest.media),
    }


def test_logits_gradients_and_exports_are_those_of_transformers(worker, folder, tmp_path):
    found = worker.run(compare, folder, tmp_path / "out")
    family = Processor.load(folder).family
    assert found["scale"] > 0.5
    assert max(found["logits"].values()) < 1e-5, found["logits"]
    worst = dict(sorted(found["gradients"].items(), key=lambda row: -row[1])[:4])
    assert len(found["gradients"]) > 20 and max(worst.values()) < 1e-5, worst
    assert found["exported"]
    towers = set() if family.media is None else set(family.media.towers)
    assert found["moved"] == {"gpt", *towers}
    assert found["media"] == (0 if family.media is None else 6 if family.media.audio is not None else 3)


def test_the_table_names_every_architecture_once():
    types = [f.model_type for f in TABLE.values()] + [f.whole.model_type for f in TABLE.values() if f.whole is not None]
    assert len(set(types)) == len(types) and len({f.tiny for f in TABLE.values()}) == len(TABLE)
    assert all(family_of(f.model_type) is f for f in TABLE.values())
    with pytest.raises(ConfigError, match=r"'gemma' is not supported; supported are llama, mistral"):
        family_of("gemma")


def refuse(path: Path) -> None:
    from relax_server.training.megatron import parallel
    from relax_server.training.megatron.build import load_model
    from transformers import AutoConfig

    parallel.initialize(seed=0)
    load_model(path, AutoConfig.from_pretrained(path))


def test_mistral_with_a_sliding_window_is_refused_by_both_sides(worker, tmp_path):
    import torch
    from relax_server.engines.embedded.model import ModelRunner
    from transformers import AutoConfig

    path = small_model(tmp_path, "Mistral", sliding_window=64)
    with pytest.raises(ConfigError, match=r"sliding_window = 64.*choose a model without it"):
        worker.run(refuse, path)
    with pytest.raises(ConfigError, match=r"sliding_window = 64.*choose a model without it"):
        ModelRunner(path, AutoConfig.from_pretrained(path), torch.float32, record_routes=False)


# ------------------------------------------------------------------------------------------------------- films that are heard


def compare_heard(path: Path, data: bytes) -> dict[str, float]:
    """Differences of logits and of every gradient, relative to their scale, of a conversation with a film and its sound."""
    import torch
    from relax_server.training.batch import make_batch, read_features
    from relax_server.training.forest import pack
    from relax_server.training.megatron import hf, parallel
    from relax_server.training.megatron.build import load_model
    from relax_server.training.megatron.hf_weights import HfWeights

    from relax_sdk import Message, Text, Video

    parallel.initialize(seed=0)
    processor = Processor.load(path)
    family, film = processor.family, Video.from_bytes(data)
    parts = (Text("a"), ITEMS["image"], film, Text("then"))
    rendered = processor.render([Message("user", parts)])
    features = features_of(processor, rendered.media)
    assert features[1].sound is not None
    ids = processor.expand(rendered.ids, features) + answer(processor, "yes")
    sample = every_token(ids, processor, rendered.media)
    read_any = lambda ref: data if ref.sha256 == film.ref.sha256 else read(ref)
    batch = make_batch([sample, sample], processor, read_features([sample], processor, read_any))
    (forest,) = pack(batch, 100_000)
    loaded = load_model(path, processor.hf_config)
    theirs = family.model_class().from_pretrained(path).eval()
    found = loaded.model.predictions(loaded.model(loaded.model.micro_batch(forest)))
    ours = (found.hidden @ found.weight.t()).index_select(0, torch.from_numpy(forest.row[np.argsort(forest.entry)]))
    wanted = hf_logits(theirs, processor, ids, features).index_select(0, torch.from_numpy(batch.trained.at - 1))
    pull = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    (ours.log_softmax(-1) * pull).sum().backward()
    (wanted.log_softmax(-1) * pull).sum().backward()
    own = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in loaded.model.named_parameters()}
    named = hf.TensorNames.of({k: t.shape for k, t in theirs.state_dict().items()}, "memory", family)
    links = hf.model_links(loaded.hf_config, named, list(own))
    mine, other = HfWeights(links, own, loaded.model.place, loaded.whole), dict(theirs.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in other.values() if p.grad is not None)
    return {
        "logits": float((ours - wanted).abs().max() / wanted.abs().max()),
        "gradients": max(float((mine[n] - p.grad).abs().max()) for n, p in other.items() if p.grad is not None) / largest,
    }


@pytest.mark.parametrize("name", [n for n, f in TABLE.items() if f.media is not None and f.media.audio_in_video])
def test_films_that_are_heard_have_the_logits_and_gradients_of_transformers(worker, tmp_path, name):
    path = large_model(TABLE[name], tmp_path)
    (path / "relax_media.json").write_text('{"use_audio_in_video": true}')
    found = worker.run(compare_heard, path, heard_film().bytes())
    assert max(found.values()) < 1e-5, found

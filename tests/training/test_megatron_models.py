"""Megatron models against transformers, and forests against separate sequences: logits, gradients and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from relax_server.models.weight_files import FolderWeights, read_weights
from training_data import (
    TINY,
    answer,
    conversation,
    every_token,
    features_of,
    hf_omni_logits,
    large_omni,
    make_sample,
    prompt,
    read,
    small_model,
)

from relax_sdk import ConfigError

LLAMA3 = dict(rope_type="llama3", rope_theta=10_000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama3-rope": ("Llama", dict(rope_parameters=LLAMA3 | dict(original_max_position_embeddings=16))),
    "linear-rope": ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=10_000.0, factor=3.0))),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=32)),
    "qwen3-moe": ("Qwen3Moe", dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)),
    "qwen3-moe-unnormalised": (
        "Qwen3Moe",
        dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=False),
    ),
    "qwen3-moe-some-dense": (
        "Qwen3Moe",
        dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[1]),
    ),
}


@pytest.fixture(scope="module", params=sorted(TEXT_MODELS))
def text_folder(request, tmp_path_factory) -> Path:
    kind, values = TEXT_MODELS[request.param]
    return small_model(tmp_path_factory.mktemp("model"), kind, **values)


@pytest.fixture(scope="module")
def omni_folder(tmp_path_factory) -> Path:
    return large_omni(tmp_path_factory.mktemp("omni"))


def _load(path: Path, **options: Any):
    from relax_server.training.megatron import parallel

    parallel.initialize(seed=0)
    from relax_server.training.megatron.build import load_model
    from transformers import AutoConfig

    return load_model(path, AutoConfig.from_pretrained(path), **options)


# ------------------------------------------------------------------------------------------------------------- weights


def round_trip(path: Path) -> dict[str, Any]:
    import tempfile

    import torch
    from relax_server.training.megatron import hf
    from relax_server.training.megatron.build import load_weights, whole_model
    from relax_server.training.megatron.folder import write_weights
    from relax_server.training.megatron.hf_weights import HfWeights

    loaded = _load(path)
    disk, back = read_weights(path), loaded.hf_weights()
    family = loaded.model.family
    memory = family.model_class().from_pretrained(path).state_dict()
    names = [n for n, _ in loaded.model.named_parameters()]
    links = hf.model_links(
        loaded.hf_config, hf.TensorNames.of({k: t.shape for k, t in memory.items()}, "memory", family), names
    )
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.zero_()
    with tempfile.TemporaryDirectory() as folder:  # with fused experts, as transformers holds them in memory
        write_weights(memory, Path(folder))
        whole = whole_model(loaded.model, links)
        load_weights(loaded.model, links, FolderWeights(Path(folder)), whole)
    again = HfWeights(links, {n: p.detach() for n, p in loaded.model.named_parameters()}, loaded.model.place, whole)
    tied = {"lm_head.weight"} if loaded.hf_config.tie_word_embeddings else set()
    return {
        "disk names": set(disk) == set(back),
        "disk exact": all(torch.equal(disk[k], back[k]) for k in back),
        "memory names": set(memory) - tied == set(again),
        "memory exact": all(torch.equal(memory[k], again[k]) for k in again),
        "disk from memory": all(torch.equal(disk[k], v) for k, v in loaded.hf_weights().items()),
    }


def test_weights_survive_both_layouts_exactly(worker, text_folder):
    assert all(worker.run(round_trip, text_folder).values())


def test_omni_weights_survive_both_layouts_exactly(worker, omni_folder):
    assert all(worker.run(round_trip, omni_folder).values())


def load_damaged(path: Path, change: str) -> None:
    import shutil
    import tempfile

    from relax_server.training.megatron import folder

    with tempfile.TemporaryDirectory() as temporary:
        damaged = Path(temporary)
        shutil.copy(path / "config.json", damaged)
        weights = read_weights(path)
        if change == "missing":
            del weights["model.layers.1.self_attn.q_proj.weight"]
        elif change == "unexpected":
            weights["model.layers.9.self_attn.q_proj.weight"] = weights["model.norm.weight"].clone()
        elif change == "shape":
            weights["model.layers.1.self_attn.o_proj.weight"] = weights["model.layers.1.self_attn.o_proj.weight"][:-1]
        else:
            weights["model.layers.1.self_attn.o_proj.weight"] = weights["model.layers.1.self_attn.o_proj.weight"].char()
        folder.write_weights(weights, damaged)
        _load(damaged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"1 weights are missing \['model\.layers\.1\.self_attn\.q_proj\.weight'\]"),
        ("unexpected", r"1 belong nowhere \['model\.layers\.9"),
        ("shape", r"safetensors: tensor \S+o_proj\.weight has shape \[127, 128\], and config\.json wants \[128, 128\]"),
        ("dtype", r"safetensors: tensor \S+o_proj\.weight has dtype I8; allowed: .*the folder that they were made from"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(worker, change, message):
    with pytest.raises(ConfigError, match=message):
        worker.run(load_damaged, resolve_model("relax/tiny-qwen3"), change)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("Llama", dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0)), "yarn"),
        ("Llama", dict(attention_bias=True), "attention_bias"),
        ("Qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1), "sliding"),
        ("Llama", dict(hidden_act="gelu"), "hidden_act"),
        ("Gemma", dict(head_dim=16), "model_type 'gemma'"),
    ],
)
def test_models_that_would_be_computed_wrongly_are_refused(worker, tmp_path, kind, values, message):
    with pytest.raises(ConfigError, match=message):
        worker.run(_load, small_model(tmp_path, kind, **values))


# -------------------------------------------------------------------------------------------------------------- logits


def _logits(model: Any, forest: Any) -> Any:
    """[r, v] of the rows of a forest."""
    found = model.predictions(model(model.micro_batch(forest)))
    return found.hidden @ found.weight.t()


def _forest_logits(loaded: Any, processor: Processor, samples: list[Any], share: bool = True) -> tuple[Any, Any, Any]:
    """(logits of every trained token [n, v], batch, forest) of samples in one forest."""
    import torch
    from relax_server.training.batch import make_batch, read_features
    from relax_server.training.forest import pack

    batch = make_batch(samples, processor, read_features(samples, processor, read))
    (forest,) = pack(batch, 100_000, share)
    rows = _logits(loaded.model, forest)
    by_entry = torch.zeros(len(batch.trained), rows.shape[1]).index_copy(
        0, torch.from_numpy(forest.entry), rows.index_select(0, torch.from_numpy(forest.row))
    )
    return by_entry, batch, forest


class _Ids:
    """Stands for a processor where a model folder has no tokenizer: ids are just numbers."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.placeholder_ids, self.banned_ids = vocab_size, {}, ()


def text_logits(path: Path) -> tuple[float, float]:
    import torch
    from transformers import AutoModelForCausalLM

    loaded, reference = _load(path), AutoModelForCausalLM.from_pretrained(path).eval()
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, TINY["vocab_size"], n).tolist() for n in (40, 7, 23)]
    ids += [ids[0][:20] + ids[1], ids[0]]
    with torch.no_grad():
        ours, _, _ = _forest_logits(loaded, _Ids(TINY["vocab_size"]), [make_sample(x, [0] + [1] * (len(x) - 1)) for x in ids])
        theirs = torch.cat([reference(torch.tensor([x])).logits[0, :-1] for x in ids])
    return float((ours - theirs).abs().max()), float(theirs.abs().max())


def test_text_logits_are_those_of_transformers(worker, text_folder):
    difference, scale = worker.run(text_logits, text_folder)
    assert scale > 1
    assert difference < 1e-5


CASES = {
    "text": ["hello"],
    "image": ["image", "what?"],
    "audio": ["audio", "hear"],
    "long audio": ["long", "hear"],
    "short audio": ["short", "hear"],
    "video": ["video", "see"],
    "mixed": ["video", "a", "audio", "b", "image", "long", "image2", "and?"],
}


def omni_logits(path: Path) -> dict[str, float]:
    import torch
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

    loaded, processor = _load(path), Processor.load(path)
    reference = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(path).eval()
    samples, features = [], []
    for parts in CASES.values():
        ids, media = prompt(processor, *parts)
        samples.append(every_token(ids + answer(processor, "yes"), processor, media))
        features.append(features_of(processor, media))
    with torch.no_grad():
        ours, batch, forest = _forest_logits(loaded, processor, samples)
    assert len(forest.media) == 6  # each item once, however often it occurs
    out = {}
    for i, name in enumerate(CASES):
        theirs = hf_omni_logits(reference, samples[i].ids, features[i])
        mine = batch.trained.sample == i
        out[name] = float((ours[mine] - theirs[batch.trained.at[mine] - 1]).abs().max() / theirs.abs().max())
    return out


def test_omni_logits_are_those_of_transformers(worker, omni_folder):
    differences = worker.run(omni_logits, omni_folder)
    assert differences.keys() == CASES.keys()
    assert max(differences.values()) < 1e-5, differences


# ------------------------------------------------------------------------------------------- forests, alone, gradients


def forest_against_separate(path: Path, recompute: bool) -> dict[str, float]:
    """Largest difference of logprobs and gradients, relative to their scale."""
    import torch
    from relax_server.training.batch import make_batch, read_features
    from relax_server.training.forest import pack

    loaded, processor = _load(path, recompute=recompute), Processor.load(path)
    if processor.modalities:
        one, two, three = ["image", "what?"], ["image2", "what?"], ["audio", "hear?"]
        samples = [
            conversation(processor, [(one, "A"), (["video", "now?"], "BCD"), (["short", "x"], "E")]),
            conversation(processor, [(one, "A"), (["video", "now?"], "BXY")]),
            conversation(processor, [(one, "A"), (["image2", "now?"], "B")]),
            conversation(processor, [(two, "A"), (["video", "now?"], "BCD")]),
            conversation(processor, [(two, "C")]),
            conversation(processor, [(three, "C"), (["audio", "again?"], "D")]),
            conversation(processor, [(["words"], "C")]),
        ]
    else:
        one = ["a rather long question"]
        samples = [
            conversation(processor, [(one, "A"), (["and"], "BCD"), (["then"], "E")]),
            conversation(processor, [(one, "A"), (["and"], "BX")]),
            conversation(processor, [(one, "A long answer")]),
            conversation(processor, [(["other"], "A")]),
        ]
        samples.append(samples[1])
    batch = make_batch(samples, processor, read_features(samples, processor, read))
    weight = torch.randn(len(batch.trained), generator=torch.Generator().manual_seed(1))
    target = torch.from_numpy(batch.trained.target)
    results = []
    for forests in (
        pack(batch, 100_000),
        [f for i in range(len(batch)) for f in pack(batch, 100_000, False, [i])],
        pack(batch, 80),
    ):
        loaded.model.train()
        loaded.model.zero_grad(set_to_none=True)
        logprobs = torch.zeros(len(batch.trained))
        for forest in forests:
            rows = torch.log_softmax(_logits(loaded.model, forest), -1)
            entry = torch.from_numpy(forest.entry)
            mine = rows[torch.from_numpy(forest.row), target[entry]]
            (mine * weight[entry]).sum().backward()
            logprobs[entry] = mine.detach()
        results.append((len(forests), logprobs, {n: p.grad for n, p in loaded.model.named_parameters() if p.grad is not None}))
    (n_one, logp, grads), (n_alone, logp_alone, grads_alone), (n_split, logp_split, grads_split) = results
    assert n_one == 1 and n_alone == len(samples) and n_split > 2
    assert grads.keys() == grads_alone.keys() == grads_split.keys()
    assert not processor.modalities or any(
        float(g.abs().max()) > 0 for n, g in grads.items() if n.startswith("visual.merger_list")
    )
    scale = max(float(g.abs().max()) for g in grads_alone.values())
    worst = lambda a, b: max(float((a[n] - b[n]).abs().max()) for n in a) / scale
    return {
        "logprobs": float((logp - logp_alone).abs().max() / logp_alone.abs().max()),
        "gradients": worst(grads, grads_alone),
        "split logprobs": float((logp_split - logp_alone).abs().max() / logp_alone.abs().max()),
        "split gradients": worst(grads_split, grads_alone),
    }


@pytest.mark.parametrize("recompute", [False, True])
def test_a_forest_is_its_sequences(worker, recompute):
    differences = worker.run(forest_against_separate, resolve_model("relax/tiny-qwen3"), recompute)
    assert max(differences.values()) < 2e-6, differences


@pytest.mark.parametrize("recompute", [False, True])
def test_an_omni_forest_is_its_sequences(worker, omni_folder, recompute):
    differences = worker.run(forest_against_separate, omni_folder, recompute)
    assert max(differences.values()) < 2e-6, differences


def short_sounds(path: Path) -> float:
    """How much the logits of a short sound depend on the sounds beside it."""
    import torch

    loaded, processor = _load(path), Processor.load(path)
    samples = []
    for name in ("short", "long", "audio"):
        ids, media = prompt(processor, name, "hear")
        samples.append(every_token(ids + answer(processor, "yes"), processor, media))
    with torch.no_grad():
        together, batch, _ = _forest_logits(loaded, processor, samples)
        alone, _, _ = _forest_logits(loaded, processor, samples[:1])
    return float((together[batch.trained.sample == 0] - alone).abs().max())


def test_a_short_sound_does_not_depend_on_its_neighbours(worker, omni_folder):
    assert worker.run(short_sounds, omni_folder) < 1e-5


def blocks_against_mask(seed: int) -> float:
    """Attention in blocks against one dense mask, for random forests of all shapes."""
    import torch
    from relax_server.training.megatron.attention import attend

    rng = np.random.default_rng(seed)
    end: list[int] = []

    def grow(depth: int) -> None:
        first = len(end)
        length = int(rng.choice([1, 3, 20, 90, 200]))
        end.extend([0] * length)
        for _ in range(int(rng.integers(0, 4)) if depth < 3 else 0):
            grow(depth + 1)
        end[first : first + length] = [len(end)] * length

    while len(end) < 300:
        grow(0)
    t = len(end)
    q, k, v = (torch.randn(t, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    ends, index = torch.tensor(end), torch.arange(t)
    mask = (index <= index[:, None]) & (index[:, None] < ends)
    ours = attend(q, k, v, ends, None)
    dense = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))), attn_mask=mask
    )
    dense = dense[0].transpose(0, 1).reshape(t, -1)
    weight = torch.randn_like(dense)
    got = torch.autograd.grad((ours * weight).sum(), (q, k, v))
    wanted = torch.autograd.grad((dense * weight).sum(), (q, k, v))
    return max(float((a - b).abs().max()) for a, b in zip((ours, *got), (dense, *wanted), strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_blocks_are_the_mask(worker, seed):
    assert worker.run(blocks_against_mask, seed) < 1e-12


# ----------------------------------------------------------------------------------------------------------- CPU shim


def from_pretrained_with_shim(path: Path) -> list[bool]:
    import torch
    from relax_server.training.megatron import cpu
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Thinker

    cpu.install()
    built = Thinker(Thinker.config_class.from_pretrained(path))
    loaded = Thinker.from_pretrained(path)
    return [torch.equal(a, b) for (_, a), (_, b) in zip(built.named_buffers(), loaded.named_buffers(), strict=True)]


def test_the_shim_leaves_buffers_of_transformers_models_whole(worker, omni_folder):
    same = worker.run(from_pretrained_with_shim, omni_folder)
    assert len(same) >= 3
    assert all(same)


def tensor_type() -> str:
    import torch
    from relax_server.training.megatron import cpu

    cpu.install()
    return str(torch.zeros(1, device="cuda").type())


def test_the_shim_stays_in_its_process(worker):
    import torch

    assert worker.run(tensor_type) == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type() == "torch.FloatTensor"

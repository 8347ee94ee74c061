"""Adapters and frozen towers: gradients, what moves and what stays, the reference, checkpoints, and what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_server.models.adapter_files import ADAPTERS, fingerprint, read_adapters
from relax_server.models.catalog import resolve_model
from relax_server.models.weight_files import read_weights
from training_data import letter_groups, make_policy, read

from relax_sdk import CheckpointError, ConfigError
from relax_sdk.tuning import TARGETS, LoraConfig, TowersConfig, Tuning

OMNI, TEXT = "relax/tiny-omni", "relax/tiny-qwen3"
EVERYWHERE = Tuning(LoraConfig(rank=4, alpha=6.0, targets=TARGETS))
DECODER = Tuning(LoraConfig(rank=4, alpha=6.0))


def samples_of(policy: Any) -> list[Any]:
    """One sample of each of four groups: with a sound, a picture, a film and a short sound where the model takes them."""
    return [group.trajectories[0].samples()[0] for group in letter_groups(policy.processor)]


def train(policy: Any, steps: int, first: int = 0) -> Any:
    for number in range(first, first + steps):
        policy.train_step(letter_groups(policy.processor, seed=number), read, number)
    return policy


def gap(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


# ------------------------------------------------------------------------------------------------------------- gradients


def gradients(policy: Any) -> dict[str, Any]:
    """Gradients of the mean cross entropy of `samples_of`, by Megatron's names."""
    from relax_server.training.batch import make_batch, read_features
    from relax_server.training.objective import cross_entropy

    samples = samples_of(policy)
    batch = make_batch(samples, policy.processor, read_features(samples, policy.processor, read))
    policy._accumulate(policy._pack(batch), cross_entropy, policy._targets(batch))
    model = policy._loaded.model
    return {name: p.main_grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def against_the_merged_formula(folder: Path, name: str, recompute: bool) -> tuple[float, int]:
    """Gradients of A and B, and those that follow from the gradient of W in a model with merged weights, which is
    dA = s B^T dW and dB = s dW A^T; returns the largest relative difference, and how many matrices were compared."""
    import torch
    from relax_server.training.megatron.hf_weights import HfWeights

    policy = train(make_policy(name, tuning=EVERYWHERE if name == OMNI else DECODER, lr=1e-2, recompute=recompute), 2)
    policy.export(folder / "m")
    ours = gradients(policy)
    whole = make_policy(folder / "m")
    loaded = whole._loaded
    theirs = dict(HfWeights(loaded.links, gradients(whole), loaded.model.place, loaded.whole).items())
    worst, compared = 0.0, 0
    for layer, module in policy._loaded.model.named_modules():
        if not layer.endswith(".adapter"):
            continue
        for short, (tensor, (a, b)) in zip(module.lora_A, module.pairs().items(), strict=True):
            slope = theirs[f"{tensor}.weight"]
            pairs = (("lora_A", module.scale * b.t() @ slope), ("lora_B", module.scale * slope @ a.t()))
            for kind, wanted in pairs:
                difference = (ours[f"{layer}.{kind}.{short}"] - wanted).norm() / wanted.norm().clamp(min=1e-5)
                worst, compared = max(worst, float(difference)), compared + 1
    assert all(torch.isfinite(gradient).all() for gradient in ours.values()) and compared == len(ours)
    return worst, compared


@pytest.mark.parametrize(("name", "recompute"), [(TEXT, False), (OMNI, False), (OMNI, True)])
def test_gradients_are_those_of_the_merged_formula(worker, tmp_path, name, recompute):
    worst, compared = worker.run(against_the_merged_formula, tmp_path, name, recompute)
    assert worst < 1e-3 and compared >= 2 * 21  # float32; some gradients are differences of large numbers


# --------------------------------------------------------------------------------------------------- what the model computes


def before_and_after(folder: Path, name: str, tuning: Tuning) -> dict[str, Any]:
    base, policy = make_policy(name), make_policy(name, tuning=tuning, lr=1e-2, kl_coef=0.1)
    samples = samples_of(base)
    first, fresh = base.logprobs(samples, read), policy.logprobs(samples, read)
    train(policy, 3)
    policy.export(folder / "m")
    trained = policy.logprobs(samples, read)
    with policy._reference.in_place():
        reference = policy.logprobs(samples, read)
    merged = make_policy(folder / "m").logprobs(samples, read)
    return dict(
        fresh=gap(first, fresh),
        moved=gap(first, trained),
        merged=gap(merged, trained),
        reference=gap(first, reference),
        back=gap(trained, policy.logprobs(samples, read)),
        copied=policy._reference.nbytes,
        trained=[n for n, p in policy._loaded.model.named_parameters() if p.requires_grad],
        optimized=sum(p.numel() for group in policy.trainer.optimizer.param_groups for p in group["params"]),
        buffers=sum(b.grad_data.numel() for b in policy.trainer.wrapped[0].buffers),
    )


@pytest.mark.parametrize(("name", "tuning"), [(TEXT, DECODER), (OMNI, EVERYWHERE)])
def test_a_new_adapter_adds_nothing_a_trained_one_is_in_the_export_and_the_reference_has_none(worker, tmp_path, name, tuning):
    found = worker.run(before_and_after, tmp_path, name, tuning)
    assert found["fresh"] == found["reference"] == found["back"] == 0.0 and found["copied"] == 0
    assert found["moved"] > 0.1 and found["merged"] < 1e-5
    assert found["trained"] and all(".adapter.lora_" in parameter for parameter in found["trained"])
    rank, wide = 4, 128
    if name == TEXT:  # q, k, v, o, gate, up and down of three layers; nothing else has a gradient or moments
        per_layer = rank * (2 * (wide + wide) + 2 * (wide + 64) + 3 * (wide + 512))
        assert found["optimized"] == 3 * per_layer and found["buffers"] < 1.01 * 3 * per_layer


def exported_by_formula(folder: Path, name: str, tuning: Tuning) -> None:
    train(make_policy(name, tuning=tuning, lr=1e-2), 2).export(folder / "m")


@pytest.mark.parametrize(
    ("name", "tuning", "modules"),
    [
        (TEXT, DECODER, ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]),
        (OMNI, DECODER, None),
    ],
)
def test_the_adapter_folder_is_pefts_and_its_formula_gives_the_merged_weights(worker, tmp_path, name, tuning, modules):
    worker.run(exported_by_formula, tmp_path, name, tuning)
    config = json.loads((tmp_path / "m" / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["bias"]) == ("LORA", 4, 6.0, "none")
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "m" / "adapter" / "adapter_model.safetensors")
    base, merged = read_weights(resolve_model(name)), read_weights(tmp_path / "m")
    full = "model.language_model." if name == OMNI else "model."
    if modules is None:  # the sound tower has a q_proj too, so those of the decoder are named in full; experts are one by one
        assert "model.language_model.layers.2.self_attn.q_proj" in config["target_modules"]
        assert {"gate_proj", "up_proj", "down_proj"} < {*config["target_modules"]} and "q_proj" not in config["target_modules"]
    else:
        assert config["target_modules"] == modules
    changed = 0
    for layer, weight in ((key.removesuffix(".weight"), base[key]) for key in base if key.endswith(".weight")):
        key = "base_model.model." + (full + layer.removeprefix("model.") if layer.startswith("model.") else layer)
        a, b = tensors.pop(f"{key}.lora_A.weight", None), tensors.pop(f"{key}.lora_B.weight", None)
        if a is None or b is None:
            assert np.array_equal(weight.numpy(), merged[f"{layer}.weight"].numpy()), layer
            continue
        assert a.shape == (4, weight.shape[1]) and b.shape == (weight.shape[0], 4)
        assert np.abs((weight + 6.0 / 4 * b @ a - merged[f"{layer}.weight"]).numpy()).max() < 1e-6
        changed += 1
    assert not tensors and changed == (3 * 7 if name == TEXT else 3 * (4 + 4 * 3))


# ------------------------------------------------------------------------------------------------------------------- towers


def moved(tuning: Tuning, lr: float) -> dict[str, tuple[float, float]]:
    """By the first word of a parameter's name: how far parameters have moved in one step, the most and in sum."""
    policy = make_policy(OMNI, tuning=tuning, lr=lr, clip_grad=1e9, eps=1e-20)
    before = {name: p.detach().clone() for name, p in policy._loaded.model.named_parameters()}
    train(policy, 1)
    out: dict[str, tuple[float, float]] = {}
    for name, p in policy._loaded.model.named_parameters():
        change, tower = (p.detach() - before[name]).abs(), name.partition(".")[0]
        largest, total = out.get(tower, (0.0, 0.0))
        out[tower] = (max(largest, float(change.max())), total + float(change.sum()))
    return out


def test_a_frozen_tower_stays_bit_for_bit_and_one_may_have_its_own_rate(worker):
    lr = 1e-3  # AdamW's first step moves what has a gradient by the learning rate, which is lr / 20 in the first of the rise
    found = worker.run(moved, Tuning(towers=TowersConfig(visual="freeze", audio_tower_lr_factor=0.25)), lr)
    assert found["visual"] == (0.0, 0.0)
    assert found["gpt"][0] == pytest.approx(lr / 20, rel=0.01)
    assert found["audio_tower"][0] == pytest.approx(lr / 80, rel=0.01)
    found = worker.run(moved, Tuning(LoraConfig(rank=2), TowersConfig(visual="train", visual_lr=3e-3)), lr)
    assert found["audio_tower"] == (0.0, 0.0)
    assert found["visual"][0] == pytest.approx(3 * lr / 20, rel=0.01) and found["gpt"][0] == pytest.approx(lr / 20, rel=0.01)


def whole_tower_beside_adapters(folder: Path) -> None:
    tuning = Tuning(LoraConfig(rank=2, targets=("attention",)), TowersConfig(visual="train"))
    train(make_policy(OMNI, tuning=tuning, lr=1e-2), 1).export(folder / "m")


def test_a_tower_that_is_trained_whole_is_saved_beside_the_adapters(worker, tmp_path):
    from safetensors.torch import load_file

    worker.run(whole_tower_beside_adapters, tmp_path)
    assert json.loads((tmp_path / "m" / "adapter" / "adapter_config.json").read_text())["modules_to_save"] == ["visual"]
    tensors, merged = load_file(tmp_path / "m" / "adapter" / "adapter_model.safetensors"), read_weights(tmp_path / "m")
    prefix = "base_model.model.model."
    saved = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(f"{prefix}visual.")}
    assert saved.keys() == {name for name in merged if name.startswith("visual.")}
    assert all(np.array_equal(tensor.numpy(), merged[name].numpy()) for name, tensor in saved.items())


@pytest.mark.parametrize(
    ("name", "write", "options"),
    [
        (TEXT, exported_by_formula, (TEXT, DECODER)),
        (OMNI, exported_by_formula, (OMNI, EVERYWHERE)),
        (OMNI, whole_tower_beside_adapters, ()),
    ],
    ids=["text", "omni", "a tower trained whole"],
)
def test_peft_loads_the_adapter_folder_over_the_base_model(worker, tmp_path, name, write, options):
    """Its model computes what the model with merged weights does, and merging it gives these weights."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, Qwen3OmniMoeThinkerForConditionalGeneration

    worker.run(write, tmp_path, *options)
    cls: Any = AutoModelForCausalLM if name == TEXT else Qwen3OmniMoeThinkerForConditionalGeneration
    base, merged = (cls.from_pretrained(path, dtype=torch.float32).eval() for path in (resolve_model(name), tmp_path / "m"))
    ids = torch.arange(40, 72)[None]
    with torch.no_grad():
        before = base(input_ids=ids).logits
        model = PeftModel.from_pretrained(base, tmp_path / "m" / "adapter").eval()
        wanted, found = merged(input_ids=ids).logits, model(input_ids=ids).logits
    assert (found - wanted).abs().max() < 1e-5 < 1e-2 < (found - before).abs().max()
    weights = model.merge_and_unload().state_dict()
    assert weights.keys() == merged.state_dict().keys()
    assert max(float((weights[key] - tensor).abs().max()) for key, tensor in merged.state_dict().items()) < 1e-6


def tower_graphs(tuning: Tuning) -> list[bool]:
    """Whether each call of a tower made a graph for the backward pass."""
    import torch

    policy, seen = make_policy(OMNI, tuning=tuning), []
    for tower in (policy._loaded.model.visual, policy._loaded.model.audio_tower):

        def look(module: Any, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                found = output.pooler_output if output.get("pooler_output") is not None else output.last_hidden_state
                seen.append(found.requires_grad)

        tower.register_forward_hook(look)
    train(policy, 1)
    return seen


def test_frozen_towers_have_no_graph(worker):
    assert worker.run(tower_graphs, DECODER) == [False] * 3
    assert worker.run(tower_graphs, EVERYWHERE) == [True] * 3


def test_what_the_model_does_not_have_is_refused(worker):
    with pytest.raises(ConfigError, match=r"LoraConfig\.targets = \('visual',\): the model has no visual"):
        worker.run(moved_text, Tuning(LoraConfig(rank=2, targets=("visual",))))
    with pytest.raises(ConfigError, match=r"the model has no experts; it has other layers"):
        worker.run(moved_text, Tuning(LoraConfig(rank=2, targets=("experts",))))
    with pytest.raises(ConfigError, match=r"towers\.visual = 'freeze' with 'visual' in lora\.targets; allowed: 'auto'"):
        Tuning(LoraConfig(rank=2, targets=("visual",)), TowersConfig(visual="freeze"))
    with pytest.raises(ConfigError, match=r"visual_lr = 0\.1; allowed: none, as towers\.visual = 'freeze'"):
        TowersConfig(visual="freeze", visual_lr=0.1)
    with pytest.raises(ConfigError, match=r"visual_lr_factor = 2\.0; allowed: none, as visual_lr = 0\.1 is given"):
        TowersConfig(visual_lr=0.1, visual_lr_factor=2.0)


def moved_text(tuning: Tuning) -> None:
    make_policy(TEXT, tuning=tuning)


# ----------------------------------------------------------------------------------------------- checkpoints and the reference


def resumed(folder: Path, tuning: Tuning) -> tuple[bool, bool, int, int]:
    """Whether a run that was broken off continues bit for bit, and bytes of its checkpoint beside those of all weights."""
    import torch

    whole = train(make_policy(OMNI, tuning=tuning, lr=1e-2), 4)
    train(make_policy(OMNI, tuning=tuning, lr=1e-2), 2).save(folder / "c", {"n": 1})
    other = make_policy(OMNI, tuning=tuning, lr=1e-2)
    meta = other.load(folder / "c")
    train(other, 2, first=2)
    pairs = zip(whole._loaded.model.parameters(), other._loaded.model.parameters(), strict=True)
    size = sum(file.stat().st_size for file in (folder / "c").iterdir())
    return (
        all(torch.equal(a, b) for a, b in pairs),
        meta == {"n": 1},
        size,
        sum(p.nbytes for p in whole._loaded.model.parameters()),
    )


@pytest.mark.parametrize("tuning", [DECODER, Tuning(towers=TowersConfig(visual="freeze", audio_tower_lr=1e-3))])
def test_a_run_goes_on_bit_for_bit_from_a_checkpoint_of_what_is_trained(worker, tmp_path, tuning):
    equal, meta, size, all_weights = worker.run(resumed, tmp_path, tuning)
    assert equal and meta
    assert size < all_weights / 4 if tuning.has_lora else size > all_weights


def continued_otherwise(folder: Path, other: Tuning) -> None:
    make_policy(TEXT, tuning=DECODER).save(folder / "c", {})
    make_policy(TEXT, tuning=other).load(folder / "c")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Tuning(LoraConfig(rank=8, alpha=6.0)), r"lora\.rank: 4 in the checkpoint, 8 here"),
        (Tuning(LoraConfig(rank=4, alpha=6.0, targets=("attention",))), r"lora\.targets: \['attention', 'mlp', 'experts'\]"),
        (Tuning(), r"lora: \{'rank': 4, .* None here"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused_with_the_difference(worker, tmp_path, other, message):
    with pytest.raises(CheckpointError, match=message):
        worker.run(continued_otherwise, tmp_path, other)


def warmed_up(folder: Path, tuning: Tuning) -> tuple[float, float, int]:
    """The reference after a warm-up, which is the model that the warm-up made, also where the run goes on."""
    policy = make_policy(OMNI, tuning=tuning, lr=1e-2, kl_coef=0.1)
    samples = samples_of(policy)
    policy.warmup_step(samples, read, 1e-2)
    policy.end_warmup()
    policy.export(folder / "reference")
    wanted = policy.logprobs(samples, read)
    train(policy, 2)
    other = make_policy(OMNI, tuning=tuning, lr=1e-2, kl_coef=0.1)
    other.load_reference(folder / "reference")
    found = []
    for one in (policy, other):
        with one._reference.in_place():
            found.append(gap(one.logprobs(samples, read), wanted))
    return found[0], found[1], policy._reference.nbytes


@pytest.mark.parametrize("tuning", [EVERYWHERE, Tuning(towers=TowersConfig(visual="freeze"))])
def test_after_a_warm_up_the_reference_is_what_it_made_and_copies_only_what_is_trained(worker, tmp_path, tuning):
    first, again, copied = worker.run(warmed_up, tmp_path, tuning)
    assert first == 0.0 and again < 1e-5
    weights = sum(tensor.nbytes for tensor in read_weights(resolve_model(OMNI)).values())
    assert 0 < copied < (weights / 10 if tuning.has_lora else weights)


# --------------------------------------------------------------------------------------------------------------- publishing


def published(folder: Path, tuning: Tuning, dtype: str) -> None:
    policy = make_policy(OMNI, tuning=tuning, lr=1e-2, publish_adapters=True, dtype=dtype)
    for version in range(1, 5):
        train(policy, 1, first=version)
        policy.export_weights(folder / f"v{version}")
    policy.export(folder / "m")


@pytest.mark.parametrize(
    ("tuning", "dtype"),
    [
        (EVERYWHERE, "float32"),
        (DECODER, "bfloat16"),
        (Tuning(LoraConfig(rank=4), TowersConfig(audio_tower="train")), "float32"),
    ],
)
def test_what_is_published_merges_to_the_exported_weights_bit_for_bit(worker, tmp_path, tuning, dtype):
    """After several updates, one of them left out: an engine merges into its base, so nothing is carried on."""
    import torch
    from relax_server.engines.embedded.weight_reader import WeightReader

    worker.run(published, tmp_path, tuning, dtype)
    base, have = resolve_model(OMNI), read_weights(resolve_model(OMNI))
    have = {name: tensor.to(getattr(torch, dtype)) for name, tensor in have.items()}
    reader, exported = WeightReader(base, getattr(torch, dtype)), read_weights(tmp_path / "m")
    for version in (1, 2, 4):
        assert [file.name for file in (tmp_path / f"v{version}").iterdir()] == [ADAPTERS]
        update = reader.read(tmp_path / f"v{version}", undefined=False)
        assert not update.whole and len(update.tensors) < len(have)
        have |= update.tensors
        reader.taken(update)
    assert all(torch.equal(have[name], tensor) for name, tensor in exported.items())
    everything = reader.read(tmp_path / "v4", undefined=True)  # as after the memory of the weights was given back
    assert everything.whole and all(torch.equal(everything.tensors[name], tensor) for name, tensor in exported.items())
    reader.taken(reader.read(resolve_model(OMNI, 1), undefined=False))
    assert reader.read(tmp_path / "v4", undefined=False).whole  # other weights were loaded meanwhile
    with pytest.raises(ConfigError, match="belong to other weights"):
        WeightReader(resolve_model(OMNI, 1), torch.float32).read(tmp_path / "v4", undefined=False)


def test_damaged_adapters_are_named_and_a_fingerprint_tells_models_apart(worker, tmp_path):
    assert fingerprint(resolve_model(TEXT)) == fingerprint(resolve_model(TEXT)) != fingerprint(resolve_model(TEXT, 1))
    assert read_adapters(tmp_path) is None
    (tmp_path / ADAPTERS).write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"adapters\.safetensors: cannot be read as adapters"):
        read_adapters(tmp_path)

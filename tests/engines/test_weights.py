"""Weight updates in place: every name and shape is accounted for before anything changes."""

import pytest
import torch
import transformers
from relax_server.engines.embedded import weights
from relax_server.models.catalog import resolve_model
from relax_server.models.weight_files import read_weights
from safetensors.torch import save_file

from relax_sdk.errors import ConfigError


def load(name: str, seed: int = 0):
    path = resolve_model(name, seed)
    if name == "relax/tiny-omni":
        return transformers.Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(path), path
    return transformers.AutoModelForCausalLM.from_pretrained(path), path


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("relax/tiny-omni", ""), ("relax/tiny-omni", "thinker."), ("relax/tiny-qwen3", ""), ("relax/tiny-llama", "")],
)
def test_an_updated_model_equals_a_freshly_loaded_one(name, prefix):
    model, _ = load(name)
    other, folder = load(name, 1)
    tensors = {prefix + n: t for n, t in read_weights(folder).items()}
    weights.copy(weights.assign(model, tensors))
    expected = other.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_fused_and_tied_names_are_understood():
    model, _ = load("relax/tiny-omni")
    other, _ = load("relax/tiny-omni", 1)
    weights.copy(weights.assign(model, other.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    tied = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape, num_key_value_heads=2, tie_word_embeddings=True))
    tensors = {n: t + 1 for n, t in tied.state_dict().items() if n != "lm_head.weight"}
    weights.copy(weights.assign(tied, tensors))
    assert torch.equal(tied.lm_head.weight, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.language_model.norm.weight"),
        (lambda t: t.pop("model.layers.0.mlp.experts.3.up_proj.weight"), "gate_up_proj"),
        (lambda t: t.update(surplus=torch.zeros(1)), "surplus"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight: shape \[3\]"),
        (lambda t: t.update({"model.layers.0.mlp.experts.9.up_proj.weight": torch.zeros(1)}), "experts.9"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_changes(change, says):
    model, folder = load("relax/tiny-omni")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    tensors = read_weights(folder)
    change(tensors)
    with pytest.raises(ConfigError, match=says):
        weights.assign(model, tensors)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_damaged_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="safetensors"):
        read_weights(tmp_path)
    save_file({"a": torch.zeros(100)}, tmp_path / "model.safetensors")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read"):
        read_weights(tmp_path)

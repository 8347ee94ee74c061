"""What media towers keep for the backward pass: planned, and computed again where asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_server.models.catalog import resolve_model
from relax_server.models.families import TABLE
from relax_server.models.media_item import MediaFeatures
from relax_server.training.planned_model import Model
from relax_server.training.planned_towers import chunk_tokens, media_tokens, tower_bytes_per_token

from relax_sdk import TrainingConfig
from relax_sdk.tuning import TARGETS, LoraConfig, TowersConfig, Tuning

MEDIA = [family.tiny for family in TABLE.values() if family.media is not None]


def kept_by_towers(
    name: str, dtype: str, recompute: bool, tuning: Tuning, sounds: tuple[str, ...] = ("chunks",)
) -> dict[str, tuple[int, int]]:
    """Tokens of a forest by tower, as a plan counts them, and the bytes that the tower keeps for the backward pass."""
    from relax_server.training.batch import make_batch, read_features
    from relax_server.training.forest import pack
    from training_data import conversation, kept_for_backward, make_policy, read

    policy = make_policy(resolve_model(name), dtype=dtype, recompute=recompute, kl_coef=0.0, tuning=tuning)
    shown = ["image", "video", *(sounds if "audio" in policy.processor.modalities else [])]
    sample = conversation(policy.processor, [([*shown, "what are these?"], "answer")])
    features = read_features([sample], policy.processor, read)
    (forest,) = pack(make_batch([sample], policy.processor, features), 10_000)
    model = policy._loaded.model
    whole = kept_for_backward(model, forest)
    tokens = media_tokens(forest.media, chunk_tokens(planned_model(name)))
    out: dict[str, tuple[int, int]] = {}
    for tower, number in tokens.items():
        trained = [p for n, p in model.named_parameters() if n.startswith(f"{tower}.") and p.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        if trained:
            out[tower] = number, whole - kept_for_backward(model, forest)
        for parameter in trained:
            parameter.requires_grad_(True)
    return out


def planned_model(name: str) -> Model:
    from transformers import AutoConfig

    return Model.of(AutoConfig.from_pretrained(resolve_model(name)))


ADAPTED = Tuning(LoraConfig(rank=8, targets=TARGETS))


@pytest.mark.parametrize(
    ("name", "dtype", "recompute", "tuning"),
    [
        *((name, "float32", recompute, Tuning()) for name in MEDIA for recompute in (False, True)),
        ("relax/tiny-omni", "bfloat16", False, Tuning()),
        ("relax/tiny-omni", "float32", False, ADAPTED),
        ("relax/tiny-omni", "float32", True, ADAPTED),
        ("relax/tiny-omni", "float32", False, Tuning(LoraConfig(rank=8), TowersConfig(visual="train"))),
        ("relax/tiny-omni", "float32", False, Tuning(towers=TowersConfig(audio_tower="freeze"))),
    ],
)
def test_what_towers_keep_for_media_is_planned(worker, name, dtype, recompute, tuning):
    real = worker.run(kept_by_towers, name, dtype, recompute, tuning)
    planned = tower_bytes_per_token(planned_model(name), TrainingConfig(dtype=dtype, recompute=recompute), tuning)
    assert real.keys() == {tower for tower, size in planned.items() if size}
    for tower, (tokens, kept) in real.items():
        assert abs(tokens * planned[tower] - kept) < 0.1 * kept, (tower, tokens * planned[tower], kept)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["relax/tiny-omni", "relax/tiny-qwen2.5-omni"])
def test_sounds_that_end_within_a_chunk_take_no_more_than_planned(worker, name, recompute):
    real = worker.run(kept_by_towers, name, "float32", recompute, Tuning(), ("audio", "long", "short"))
    planned = tower_bytes_per_token(planned_model(name), TrainingConfig(recompute=recompute), Tuning())
    tokens, kept = real["audio_tower"]
    assert 0.5 * tokens * planned["audio_tower"] < kept < 1.02 * tokens * planned["audio_tower"]


def test_tokens_of_media_are_counted_by_tower() -> None:
    item = lambda kind, n, grid=None, sound=None: MediaFeatures(kind, np.zeros((1, 1), np.float32), n, grid, sound=sound)
    sounds = [item("audio", n) for n in (5, 13, 20)]
    film = item("video", 30 + 27, (1, 2, 2), item("audio", 27))
    assert media_tokens([item("image", 8, (1, 2, 2)), *sounds, film], 13) == {"visual": 38, "audio_tower": 5 + 13 + 26 + 39}
    assert media_tokens([item("image", 8, (1, 2, 2))], 0) == {"visual": 8, "audio_tower": 0}


def difference_of_gradients(name: str, folder: Path) -> tuple[float, str]:
    """Between an update whose towers and layers are computed again in the backward pass, and one of which all is kept."""
    from relax_server.models.weight_files import read_weights
    from training_data import gradients, largest_relative_difference, letter_groups, make_policy, read

    found: list[dict[str, Any]] = []
    for recompute in (False, True):
        policy = make_policy(resolve_model(name), recompute=recompute, kl_coef=0.0)
        policy.train_step(letter_groups(policy.processor), read, 0)
        gradients(policy, folder / str(recompute))
        found.append(read_weights(folder / str(recompute)))
    towers = ("visual.blocks.", *(["audio_tower.layers."] if "audio" in policy.processor.modalities else []))
    assert all(sum(tower in weight for weight in found[0]) > 10 for tower in towers)
    return largest_relative_difference(*found)


@pytest.mark.parametrize("name", MEDIA)
def test_a_tower_that_is_computed_again_has_the_same_gradients(worker, tmp_path, name):
    difference, weight = worker.run(difference_of_gradients, name, tmp_path)
    assert difference < 1e-5, weight

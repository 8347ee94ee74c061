"""Samples, groups and small models for the tests of training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from relax_server.models.catalog import resolve_model
from relax_server.models.families import Family
from relax_server.models.families.qwen3_omni import QWEN3_OMNI
from relax_server.models.hf_inputs import hf_inputs
from relax_server.models.processor import MediaFeatures, Processor

from relax_sdk import Audio, Image, Message, Text, Video
from relax_sdk.config import AlgorithmConfig, OptimizerConfig, SamplingParams, TrainingConfig
from relax_sdk.media import Media, MediaRef
from relax_sdk.trajectory import Group, Sample, Status, Trajectory, Turn, VersionSpan
from relax_sdk.tuning import Tuning

TINY: dict[str, Any] = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)


def media_items() -> dict[str, Media]:
    """Media by name; `image` and `image2` have the same number of tokens, so their ids are equal;
    `chunks` fills every chunk of an audio tower."""
    rng = np.random.default_rng(0)
    wave = lambda n: rng.normal(0, 0.2, n).clip(-1, 1).astype(np.float32)
    pixels = lambda *shape: rng.integers(0, 255, (*shape, 3), dtype=np.uint8)
    return {
        "image": Image.from_array(pixels(64, 96)),
        "image2": Image.from_array(pixels(64, 96)),
        "audio": Audio.from_array(wave(16_000)),
        "long": Audio.from_array(wave(37_000)),
        "short": Audio.from_array(wave(5_300)),
        "video": Video.from_array(pixels(8, 64, 64), fps=4.0),
        "chunks": Audio.from_array(wave(64_000)),
    }


ITEMS = media_items()
BYTES = {item.ref.sha256: item.bytes() for item in ITEMS.values()}


def read(ref: MediaRef) -> bytes:
    """The bytes of an item of `ITEMS`."""
    return BYTES[ref.sha256]


def features_of(processor: Processor, media: Sequence[Media]) -> list[MediaFeatures]:
    return [processor.features(m.bytes(), m.ref.sha256, m.kind) for m in media]


def prompt(processor: Processor, *parts: str) -> tuple[list[int], list[Media]]:
    """Expanded ids of one user message; parts named in `ITEMS` are media, others text."""
    content = tuple(ITEMS[p] if p in ITEMS else Text(p) for p in parts)
    rendered = processor.render([Message("user", content)])
    return processor.expand(rendered.ids, features_of(processor, rendered.media)), rendered.media


def append(processor: Processor, *parts: str) -> tuple[list[int], list[Media]]:
    """Expanded ids of a later user message, after a response that ended its turn."""
    content = tuple(ITEMS[p] if p in ITEMS else Text(p) for p in parts)
    rendered = processor.render_append([Message("user", content)], closed=True)
    return processor.expand(rendered.ids, features_of(processor, rendered.media)), rendered.media


def answer(processor: Processor, text: str) -> list[int]:
    """A response with its end-of-turn token."""
    return [*processor.tokenizer.encode(text, add_special_tokens=False), processor.eos_ids[0]]


def make_sample(ids: Sequence[int], mask: Sequence[int], media: Sequence[Media] = (), logprob: float = -1.0) -> Sample:
    turn = [0 if m else -1 for m in mask]
    return Sample(list(ids), list(mask), [logprob * m for m in mask], turn, turn, [m.ref for m in media])


def every_token(ids: Sequence[int], processor: Processor, media: Sequence[Media] = ()) -> Sample:
    """A sample in which every token after the first is trained, but those that are never sampled."""
    return make_sample(ids, [int(i > 0 and id not in processor.banned_ids) for i, id in enumerate(ids)], media)


def conversation(processor: Processor, turns: Sequence[tuple[Sequence[str], str]]) -> Sample:
    """A sample of several turns: (parts of the user's message, the answer), answers trained."""
    ids: list[int] = []
    mask: list[int] = []
    media: list[Media] = []
    for i, (parts, text) in enumerate(turns):
        given, items = append(processor, *parts) if i else prompt(processor, *parts)
        said = answer(processor, text)
        ids += given + said
        mask += [0] * len(given) + [1] * len(said)
        media += items
    return make_sample(ids, mask, media)


def make_turn(ids: list[int], response: list[int], media: Sequence[Media], *, version: int = 0, **values: Any) -> Turn:
    logprobs = values.pop("logprobs", [-5.0] * len(response))
    spans = [VersionSpan(version, 0, len(response))]
    return Turn(ids, response, logprobs, spans, media=[m.ref for m in media], **values)


def make_trajectory(turns: list[Turn], reward: float, index: int = 0, group: str = "g", size: int = 1) -> Trajectory:
    return Trajectory(
        id=f"{group}-{index}",
        env="test-v0",
        env_version="0",
        task_index=0,
        group_id=group,
        group_index=index,
        group_size=size,
        seed=index,
        status=Status.COMPLETED if turns else Status.FAILED,
        turns=turns,
        reward=reward,
    )


def letter_groups(processor: Processor, n_groups: int = 4, size: int = 6, seed: int = 0, version: int = 0) -> list[Group]:
    """Groups of one-turn episodes that answer a letter; A is right. The media differ from group to group."""
    rng = np.random.default_rng(seed)
    kinds = ["audio", "image", "video", "short"]
    if "audio" not in processor.modalities:
        kinds = ["image2", "image", "video", "image"] if processor.modalities else [""]
    groups = []
    for g in range(n_groups):
        parts = [kinds[g % len(kinds)]] if processor.modalities else []
        ids, media = prompt(processor, *parts, f"letter {g}?")
        letters = rng.choice(list("ABC"), size)
        trajectories = []
        for i, letter in enumerate(letters):
            said = answer(processor, str(letter) * int(rng.integers(1, 4)))
            turn = make_turn(ids, said, media, version=version, logprobs=rng.uniform(-6.5, -4.5, len(said)).tolist())
            trajectories.append(make_trajectory([turn], float(letter == "A"), i, f"g{g}", size))
        groups.append(Group(f"g{g}", "test-v0", g, trajectories))
    return groups


def with_routes(groups: list[Group], layers: int = 3, experts: int = 4, top_k: int = 2) -> list[Group]:
    """Give one-turn episodes routes as an engine records them: any, but those of a token follow from it and what is before it.

    So they are the same wherever a beginning is shared, also by groups whose prompts begin alike.
    """
    for group in groups:
        for trajectory in group.trajectories:
            (turn,) = trajectory.turns
            tokens = np.array([*turn.prompt_ids, *turn.response_ids][:-1], np.int32)
            drawn = [np.random.default_rng(tokens[: n + 1]).random((layers, experts)) for n in range(len(tokens))]
            routes = np.stack(drawn).argsort(-1)[..., :top_k].astype(np.int32)
            turn.routed_experts, turn.routed_shape = routes.tobytes(), list(routes.shape)
    return groups


def small_model(folder: Path, kind: str, **values: Any) -> Path:
    """A random model of transformers in `folder`, with weights large enough that mistakes show; without a tokenizer."""
    import torch
    import transformers

    config = getattr(transformers, f"{kind}Config")(**(TINY | values))
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float()
    enlarge(model, factor=3)
    model.save_pretrained(folder)
    return folder


def enlarge(model: Any, factor: float) -> None:
    """Norms that are not 1, biases that are not 0 and larger matrices."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
            elif "norm" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.1)


def large_omni(folder: Path) -> Path:
    """relax/tiny-omni, whose matrices are large enough, with norms and biases that are not those of a new model."""
    return large_model(QWEN3_OMNI, folder)


def large_model(family: Family, folder: Path) -> Path:
    """The built-in model of a family, with norms and biases that are not those of a new model."""
    import shutil

    import torch

    source = resolve_model(family.tiny)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    model = family.model_class().from_pretrained(source)
    enlarge(model, factor=1)
    model.save_pretrained(folder)
    return folder


def hf_logits(model: Any, processor: Processor, ids: Sequence[int], features: Sequence[MediaFeatures]) -> Any:
    """Logits [n, v] of transformers for one sequence, with gradients where they are on."""
    import torch

    if processor.modalities:
        model.model.rope_deltas = None
    tokens = torch.tensor([list(ids)])
    inputs = hf_inputs(features, processor.family, tokens, processor.hf_config)
    return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **inputs).logits[0]


def hf_omni_logits(model: Any, ids: Sequence[int], features: Sequence[MediaFeatures]) -> Any:
    """Logits [n, v] of transformers for one sequence."""
    import torch

    model.model.rope_deltas = None
    tokens = torch.tensor([list(ids)])
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **hf_inputs(features)).logits[0]


def make_policy(
    name: str | Path,
    *,
    total_steps: int = 100,
    sampling: SamplingParams | None = None,
    own_reference: bool = True,
    tuning: Tuning | None = None,
    publish_adapters: bool = False,
    takes_turns: bool = False,
    **settings: Any,
) -> Any:
    """A policy; `settings` go to the configuration that has a field of the name. Others suit random weights."""
    from relax_server.training.policy import PolicyModel

    settings = {"lr": 5e-4, "entropy_coef": 0.01} | settings
    configs: dict[str, Any] = dict(algorithm=AlgorithmConfig, optimizer=OptimizerConfig, training=TrainingConfig)
    parts = {
        key: cls(**{k: v for k, v in settings.items() if k in {f.name for f in dataclasses.fields(cls)}})
        for key, cls in configs.items()
    }
    path = name if isinstance(name, Path) else resolve_model(name)
    return PolicyModel(
        path,
        total_steps=total_steps,
        seed=0,
        sampling=sampling,
        own_reference=own_reference,
        tuning=tuning,
        publish_adapters=publish_adapters,
        takes_turns=takes_turns,
        **parts,
    )


def parameters(policy: Any) -> dict[str, np.ndarray]:
    return {name: tensor.float().cpu().numpy().copy() for name, tensor in policy._loaded.hf_weights().items()}


def gradients(policy: Any, folder: Path) -> None:
    """Write the gradients of the last update under the names of the weights; every rank writes its part."""
    from relax_server.training.megatron.folder import write_weights
    from relax_server.training.megatron.hf_weights import HfWeights

    loaded = policy._loaded
    of = {name: p.main_grad.detach() for name, p in loaded.model.named_parameters()}
    write_weights(HfWeights(loaded.links, of, loaded.model.place, loaded.whole), folder)


def largest_relative_difference(a: dict[str, Any], b: dict[str, Any]) -> tuple[float, str]:
    """The largest difference of any tensor, relative to its largest number, and its name.

    The bias of a key projection is left out: the softmax does not see it, so that its gradient is rounding errors.
    """
    assert a.keys() == b.keys()
    real = [name for name in a if not name.endswith("k_proj.bias")]
    return max((float((a[k] - b[k]).abs().max() / (b[k].abs().max() + 1e-30)), k) for k in real)


def largest_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[k] - b[k]).max()) for k in a)


def kept_for_backward(model: Any, forest: Any) -> int:
    """Bytes that a model keeps of a forest for its backward pass, each storage once; its parameters are not among them."""
    from relax_server.training.planned_towers import kept_bytes

    model.train()
    return kept_bytes(model, lambda: model(model.micro_batch(forest)))

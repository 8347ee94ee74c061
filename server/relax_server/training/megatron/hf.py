"""Hugging Face weights to Megatron parameters and back, exactly.

Both directions only view, join and split tensors. What a Hugging Face folder calls its tensors (prefixes, experts one by
one or fused) is read from its own keys, and the same names are written back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relax_sdk.errors import ConfigError
from relax_server.training.megatron.config import head_dim, moe_layers, text_config

Tensors = list[Tensor]


@dataclass(frozen=True)
class Link:
    """Megatron parameters and the Hugging Face tensors that hold the same numbers."""

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    join: Callable[[Tensors], Tensors]
    """Hugging Face tensors to Megatron's."""
    split: Callable[[Tensors], Tensors]
    """Megatron's to Hugging Face tensors."""


@dataclass(frozen=True)
class TensorNames:
    """How a Hugging Face state dict names its tensors."""

    text: str
    """Prefix of the decoder, for example `model.`."""
    head: str | None
    """Name of the output matrix; None where it is the embedding."""
    towers: Mapping[str, str]
    """Prefix of `visual` and `audio_tower`, where there are any."""
    fused_experts: bool
    """Experts stacked in one tensor, as transformers holds them in memory, or one by one, as files hold them."""

    @classmethod
    def of(cls, keys: Iterable[str], source: str) -> TensorNames:
        """Find out from the keys themselves.

        Raises:
            ConfigError: no token embedding among them.
        """
        keys = list(keys)
        embeddings = [k for k in keys if k.endswith("embed_tokens.weight")]
        if len(embeddings) != 1:
            raise ConfigError(f"{source}: {len(embeddings)} tensors named *embed_tokens.weight, expected 1")
        towers = {}
        for name, first in (("visual", "patch_embed.proj.weight"), ("audio_tower", "conv2d1.weight")):
            found = [k for k in keys if k.endswith(f"{name}.{first}")]
            if found:
                towers[name] = found[0][: -len(first)]
        return cls(
            text=embeddings[0][: -len("embed_tokens.weight")],
            head=next((k for k in keys if k.endswith("lm_head.weight")), None),
            towers=towers,
            fused_experts=any(k.endswith("mlp.experts.gate_up_proj") for k in keys),
        )


def _same(tensors: Tensors) -> Tensors:
    return list(tensors)


def _one(megatron: str, hf: str) -> Link:
    return Link((megatron,), (hf,), _same, _same)


def pack_qkv(qkv: Tensors, heads: int, groups: int, dim: int) -> Tensors:
    """Query, key and value projections as Megatron's one tensor, ordered by group: its queries, its key, its value.

    Args:
        qkv: [heads * dim, ...], [groups * dim, ...], [groups * dim, ...].

    Returns:
        One tensor [(heads + 2 * groups) * dim, ...].
    """
    rest = qkv[0].shape[1:]
    parts = [x.reshape(groups, -1, dim, *rest) for x in qkv]
    return [torch.cat(parts, 1).reshape((heads + 2 * groups) * dim, *rest)]


def unpack_qkv(packed: Tensors, heads: int, groups: int, dim: int) -> Tensors:
    """The inverse of `pack_qkv`."""
    (tensor,) = packed
    parts = tensor.view(groups, heads // groups + 2, dim, *tensor.shape[1:]).split([heads // groups, 1, 1], 1)
    return [x.reshape(-1, *tensor.shape[1:]) for x in parts]


def _attention_links(c: Any, hf: str, megatron: str) -> list[Link]:
    shape = (c.num_attention_heads, c.num_key_value_heads, head_dim(c))
    links = []
    for kind in ("weight", "bias") if c.model_type == "qwen2" else ("weight",):
        links.append(
            Link(
                (f"{megatron}self_attention.linear_qkv.{kind}",),
                tuple(f"{hf}self_attn.{x}_proj.{kind}" for x in "qkv"),
                lambda tensors: pack_qkv(tensors, *shape),
                lambda tensors: unpack_qkv(tensors, *shape),
            )
        )
    links.append(_one(f"{megatron}self_attention.linear_proj.weight", f"{hf}self_attn.o_proj.weight"))
    if c.model_type.startswith("qwen3"):
        links += [_one(f"{megatron}self_attention.{x}_layernorm.weight", f"{hf}self_attn.{x}_norm.weight") for x in "qk"]
    return links


def _mlp_links(hf: str, megatron: str) -> list[Link]:
    return [
        Link(
            (f"{megatron}linear_fc1.weight",),
            (f"{hf}gate_proj.weight", f"{hf}up_proj.weight"),
            lambda tensors: [torch.cat(tensors)],
            lambda tensors: list(tensors[0].chunk(2)),
        ),
        _one(f"{megatron}linear_fc2.weight", f"{hf}down_proj.weight"),
    ]


def _expert_links(c: Any, hf: str, megatron: str, fused: bool) -> list[Link]:
    expert = [f"{megatron}experts.local_experts.{e}." for e in range(c.num_experts)]
    links = [_one(f"{megatron}router.weight", f"{hf}gate.weight")]
    if not fused:
        for e, name in enumerate(expert):
            links += _mlp_links(f"{hf}experts.{e}.", name)
        return links
    for theirs, ours in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
        links.append(
            Link(
                tuple(f"{name}{ours}.weight" for name in expert),
                (f"{hf}experts.{theirs}",),
                lambda tensors: list(tensors[0].unbind()),
                lambda tensors: [torch.stack(tensors)],
            )
        )
    return links


def text_links(hf_config: Any, named: TensorNames, prefix: str) -> list[Link]:
    """Every parameter of the language model.

    Args:
        hf_config: the configuration of the whole model.
        named: names on the Hugging Face side.
        prefix: name of the Megatron `GPTModel` inside the model, for example `gpt.`.
    """
    c = text_config(hf_config)
    links = [
        _one(f"{prefix}embedding.word_embeddings.weight", f"{named.text}embed_tokens.weight"),
        _one(f"{prefix}decoder.final_layernorm.weight", f"{named.text}norm.weight"),
    ]
    if not hf_config.tie_word_embeddings:
        if named.head is None:
            raise ConfigError(f"{hf_config.model_type}: no lm_head.weight, but tie_word_embeddings is False")
        links.append(_one(f"{prefix}output_layer.weight", named.head))
    for i, sparse in enumerate(moe_layers(c)):
        hf, megatron = f"{named.text}layers.{i}.", f"{prefix}decoder.layers.{i}."
        links.append(_one(f"{megatron}input_layernorm.weight", f"{hf}input_layernorm.weight"))
        links.append(_one(f"{megatron}pre_mlp_layernorm.weight", f"{hf}post_attention_layernorm.weight"))
        links += _attention_links(c, hf, megatron)
        if sparse:
            links += _expert_links(c, f"{hf}mlp.", f"{megatron}mlp.", named.fused_experts)
        else:
            links += _mlp_links(f"{hf}mlp.", f"{megatron}mlp.")
    return links


def model_links(hf_config: Any, named: TensorNames, parameters: Sequence[str]) -> list[Link]:
    """Every parameter of a text or omni model.

    Args:
        hf_config: the configuration of the whole model.
        named: names on the Hugging Face side.
        parameters: names on the Megatron side: `gpt.…`, and `visual.…` and `audio_tower.…` of an omni model.

    Raises:
        ConfigError: a tower has no weights on the Hugging Face side.
    """
    links = text_links(hf_config, named, "gpt.")
    for name in parameters:
        tower = re.match(r"(visual|audio_tower)\.", name)
        if tower is None:
            continue
        if tower[1] not in named.towers:
            raise ConfigError(f"{hf_config.model_type}: the weights have no {tower[1]}")
        links.append(_one(name, named.towers[tower[1]] + name[tower.end() :]))
    return links


def to_megatron(links: Sequence[Link], weights: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Hugging Face weights under Megatron's names.

    Raises:
        ConfigError: weights are missing, or there are some that belong nowhere.
    """
    wanted = {name for link in links for name in link.hf}
    missing = sorted(wanted - set(weights))
    tied = {name for name in weights if name.endswith("lm_head.weight")}
    unexpected = sorted(set(weights) - wanted - tied)
    if missing or unexpected:
        raise ConfigError(
            f"{source}: {len(missing)} weights are missing {missing[:4]} and {len(unexpected)} belong nowhere {unexpected[:4]}"
        )
    out: dict[str, Tensor] = {}
    for link in links:
        out.update(zip(link.megatron, link.join([weights[name] for name in link.hf]), strict=True))
    return out


def to_hf(links: Sequence[Link], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Megatron parameters under Hugging Face names; views of the parameters wherever possible."""
    out: dict[str, Tensor] = {}
    for link in links:
        out.update(zip(link.hf, link.split([parameters[name] for name in link.megatron]), strict=True))
    return out

"""Hugging Face weights to Megatron parameters and back, exactly: the links of every family.

Both directions only view, join and split tensors, those of one link at a time. What a Hugging Face folder calls its tensors
(prefixes, experts one by one or stacked) is read from its own keys, and the same names are written back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from relax_sdk.errors import ConfigError
from relax_server.models.families import TABLE, Family, family_of
from relax_server.training.megatron.config import head_dim, moe_layers, text_config
from relax_server.training.megatron.link import COLUMNS, ROWS, Cut, Link, Tensors
from relax_server.training.megatron.place import Group, Place

STACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""How the names of tensors end that hold all experts of a layer."""


@dataclass(frozen=True)
class TensorNames:
    """How a Hugging Face state dict names its tensors."""

    text: str
    """Prefix of the decoder, for example `model.`."""
    head: str | None
    """Name of the output matrix; None where it is the embedding."""
    towers: Mapping[str, str]
    """Prefix of `visual` and `audio_tower`, where there are any."""
    stacked: Mapping[str, tuple[int, ...]]
    """Shape of `gate_up_proj` and `down_proj` where the experts of a layer are stacked in one tensor; empty where they are one
    by one."""

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], source: str, family: Family | None = None) -> TensorNames:
        """Find out from the tensors themselves.

        Args:
            shapes: of all tensors of a folder, by name.
            source: named in the error.
            family: of the model; needed where it has towers.

        Raises:
            ConfigError: no token embedding among them.
        """
        keys = sorted(set(shapes) - untrained(shapes))
        embeddings = [k for k in keys if k.endswith("embed_tokens.weight")]
        if len(embeddings) != 1:
            raise ConfigError(f"{source}: {len(embeddings)} tensors named *embed_tokens.weight, expected 1")
        towers = {}
        for name, tower in family.media.towers.items() if family is not None and family.media is not None else ():
            found = [k for k in keys if k.endswith(f"{name}.{tower.first}")]
            if found:
                towers[name] = found[0][: -len(tower.first)]
        return cls(
            text=embeddings[0][: -len("embed_tokens.weight")],
            head=next((k for k in keys if k.endswith("lm_head.weight")), None),
            towers=towers,
            stacked={k.rpartition(".")[2]: tuple(shapes[k]) for k in keys if k.endswith(STACKED)},
        )


def untrained(names: Iterable[str]) -> set[str]:
    """Names of tensors that belong to other parts of a whole model, such as the talker, and stay as they are."""
    names = list(names)
    prefixes = [f.whole.prefix for f in TABLE.values() if f.whole is not None]
    prefix = next((p for p in prefixes if any(name.startswith(p) for name in names)), "")
    return {name for name in names if not name.startswith(prefix)}


def _same(tensors: Tensors) -> Tensors:
    return list(tensors)


def _one(megatron: str, hf: str, *cuts: Cut) -> Link:
    return Link((megatron,), (hf,), _same, _same, cuts)


def pack_qkv(qkv: Tensors, dim: int) -> Tensors:
    """Query, key and value projections as Megatron's one tensor, ordered by group: its queries, its key, its value.

    Args:
        qkv: [heads * dim, ...], [groups * dim, ...], [groups * dim, ...].
        dim: channels of one head.

    Returns:
        One tensor [(heads + 2 * groups) * dim, ...].
    """
    rest = qkv[0].shape[1:]
    groups = qkv[1].shape[0] // dim
    return [torch.cat([x.reshape(groups, -1, dim, *rest) for x in qkv], 1).reshape(-1, *rest)]


def unpack_qkv(packed: Tensors, heads_of_group: int, dim: int) -> Tensors:
    """The inverse of `pack_qkv`."""
    (tensor,) = packed
    rest = tensor.shape[1:]
    parts = tensor.view(-1, heads_of_group + 2, dim, *rest).split([heads_of_group, 1, 1], 1)
    return [x.reshape(-1, *rest) for x in parts]


def _attention_links(c: Any, family: Family, hf: str, megatron: str) -> list[Link]:
    of_group, dim = c.num_attention_heads // c.num_key_value_heads, head_dim(c)
    links = []
    for kind in ("weight", "bias") if family.qkv_bias else ("weight",):
        links.append(
            Link(
                (f"{megatron}self_attention.linear_qkv.{kind}",),
                tuple(f"{hf}self_attn.{x}_proj.{kind}" for x in "qkv"),
                lambda tensors: pack_qkv(tensors, dim),
                lambda tensors: unpack_qkv(tensors, of_group, dim),
                (ROWS,),
            )
        )
    links.append(_one(f"{megatron}self_attention.linear_proj.weight", f"{hf}self_attn.o_proj.weight", COLUMNS))
    if family.qk_norm:
        links += [_one(f"{megatron}self_attention.{x}_layernorm.weight", f"{hf}self_attn.{x}_norm.weight") for x in "qk"]
    return links


def _mlp_links(hf: str, megatron: str, expert: bool = False) -> list[Link]:
    group = Group.EXPERT_TENSOR if expert else Group.TENSOR
    return [
        Link(
            (f"{megatron}linear_fc1.weight",),
            (f"{hf}gate_proj.weight", f"{hf}up_proj.weight"),
            lambda tensors: [torch.cat(tensors)],
            lambda tensors: list(tensors[0].chunk(2)),
            (Cut(0, group),),
            expert,
        ),
        Link((f"{megatron}linear_fc2.weight",), (f"{hf}down_proj.weight",), _same, _same, (Cut(1, group),), expert),
    ]


def _expert_links(c: Any, named: TensorNames, hf: str, megatron: str, experts: range) -> list[Link]:
    links = [_one(f"{megatron}router.weight", f"{hf}gate.weight")]
    own = [f"{megatron}experts.local_experts.{e}." for e in range(len(experts))]
    if not named.stacked:
        for e, name in zip(experts, own, strict=True):
            links += _mlp_links(f"{hf}experts.{e}.", name, expert=True)
        return links
    for theirs, ours, inputs, channels, blocks in (
        ("gate_up_proj", "linear_fc1", c.hidden_size, 0, 2),
        ("down_proj", "linear_fc2", c.moe_intermediate_size, 1, 1),
    ):
        # [experts, outputs, inputs], or [experts, inputs, outputs] where that is what the shape says, as transformers reads it.
        transposed = named.stacked[theirs][-1] != inputs
        dim = 1 + (1 - channels if transposed else channels)
        links.append(
            Link(
                tuple(f"{name}{ours}.weight" for name in own),
                (f"{hf}experts.{theirs}",),
                _unstack_transposed if transposed else lambda tensors: list(tensors[0].unbind()),
                _stack_transposed if transposed else lambda tensors: [torch.stack(tensors)],
                (Cut(0, Group.EXPERT), Cut(dim, Group.EXPERT_TENSOR, blocks)),
                expert=True,
            )
        )
    return links


def _unstack_transposed(tensors: Tensors) -> Tensors:
    return [expert.t() for expert in tensors[0].unbind()]


def _stack_transposed(tensors: Tensors) -> Tensors:
    return [torch.stack([expert.t() for expert in tensors])]


def text_links(hf_config: Any, named: TensorNames, prefix: str, place: Place) -> list[Link]:
    """Every parameter of a rank's part of the language model.

    Args:
        hf_config: the configuration of the whole model.
        named: names on the Hugging Face side.
        prefix: name of the Megatron `GPTModel` inside the model, for example `gpt.`.
        place: the part.
    """
    family = family_of(hf_config.model_type)
    c = family.text(hf_config)
    links: list[Link] = []
    embedding = f"{named.text}embed_tokens.weight"
    if place.first:
        links.append(_one(f"{prefix}embedding.word_embeddings.weight", embedding, ROWS))
    if place.last:
        links.append(_one(f"{prefix}decoder.final_layernorm.weight", f"{named.text}norm.weight"))
    if not hf_config.tie_word_embeddings:
        if named.head is None:
            raise ConfigError(f"{hf_config.model_type}: no lm_head.weight, but tie_word_embeddings is False")
        if place.last:
            links.append(_one(f"{prefix}output_layer.weight", named.head, ROWS))
    elif place.last and not place.first:
        links.append(replace(_one(f"{prefix}output_layer.weight", embedding, ROWS), is_copy=True))
    sparse_layers = moe_layers(c)
    for number, i in enumerate(place.layers):
        sparse = sparse_layers[i]
        hf, megatron = f"{named.text}layers.{i}.", f"{prefix}decoder.layers.{number}."
        links.append(_one(f"{megatron}input_layernorm.weight", f"{hf}input_layernorm.weight"))
        links.append(_one(f"{megatron}pre_mlp_layernorm.weight", f"{hf}post_attention_layernorm.weight"))
        links += _attention_links(c, family, hf, megatron)
        if sparse:
            links += _expert_links(c, named, f"{hf}mlp.", f"{megatron}mlp.", place.experts)
        else:
            links += _mlp_links(f"{hf}mlp.", f"{megatron}mlp.")
    return links


def whole_place(hf_config: Any) -> Place:
    """The part of the one rank that has a whole model."""
    c = text_config(hf_config)
    return Place.whole(c.num_hidden_layers, getattr(c, "num_experts", None) or 0)


def model_links(
    hf_config: Any, named: TensorNames, parameters: Sequence[str], place: Place | None = None, prefix: str = ""
) -> list[Link]:
    """Every parameter of a rank's part of a text or omni model.

    Args:
        hf_config: the configuration of the whole model.
        named: names on the Hugging Face side.
        parameters: names on the Megatron side: `gpt.…`, and `visual.…` and `audio_tower.…` of an omni model.
        place: the part; None: the whole model.
        prefix: what the names of these parameters begin with in the rank's model.

    Raises:
        ConfigError: a tower has no weights on the Hugging Face side.
    """
    links = text_links(hf_config, named, f"{prefix}gpt.", place if place is not None else whole_place(hf_config))
    for name in parameters:
        tower = re.match(r"(visual|audio_tower)\.", name)
        if tower is None:
            continue
        if tower[1] not in named.towers:
            raise ConfigError(f"{hf_config.model_type}: the weights have no {tower[1]}")
        links.append(_one(prefix + name, named.towers[tower[1]] + name[tower.end() :]))
    return links

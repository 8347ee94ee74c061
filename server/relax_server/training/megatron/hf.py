"""Hugging Face weights to Megatron parameters and back, exactly.

Both directions only view, join and split tensors, those of one link at a time. What a Hugging Face folder calls its tensors
(prefixes, experts one by one or fused) is read from its own keys, and the same names are written back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relax_sdk.errors import ConfigError
from relax_server.models.families import TABLE, Family, family_of
from relax_server.models.weight_files import FolderWeights
from relax_server.training.megatron.config import head_dim, moe_layers

Tensors = list[Tensor]


@dataclass(frozen=True)
class Cut:
    """How tensor parallelism divides each Hugging Face tensor of a link: joined, a rank's parts are its Megatron parameters."""

    dim: int
    blocks: int = 1
    """Parts of the tensor along `dim` that are divided each by itself: gate and up projections in one tensor are two."""

    def slices(self, shape: Sequence[int], rank: int, size: int) -> list[tuple[slice, ...]]:
        """Where a rank's parts of a tensor are, one slice for each dimension up to `dim`.

        Raises:
            ConfigError: the tensor cannot be divided evenly.
        """
        block = shape[self.dim] // self.blocks
        if shape[self.dim] % (self.blocks * size):
            raise ConfigError(f"{shape[self.dim]} of shape {list(shape)} cannot be divided by {size} tensor-parallel ranks")
        whole = tuple(slice(0, n) for n in shape[: self.dim])
        first, part = rank * (block // size), block // size
        return [(*whole, slice(b * block + first, b * block + first + part)) for b in range(self.blocks)]


WHOLE = (0, 1)
"""Rank and size of a tensor-parallel group of one."""
ROWS, COLUMNS = Cut(0), Cut(1)


@dataclass(frozen=True)
class Link:
    """Megatron parameters and the Hugging Face tensors that hold the same numbers."""

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    join: Callable[[Tensors], Tensors]
    """Hugging Face tensors to Megatron's."""
    split: Callable[[Tensors], Tensors]
    """Megatron's to Hugging Face tensors."""
    cut: Cut | None = None
    """None: every tensor-parallel rank has the whole."""

    def read(self, weights: FolderWeights, part: tuple[int, int] = WHOLE) -> Tensors:
        """Megatron parameters from a folder; only what is asked for is read.

        Args:
            weights: of the folder.
            part: rank and size of the tensor-parallel group.

        Raises:
            ConfigError: a tensor is missing, or cannot be divided evenly.
        """
        return self.join([self._read(weights, name, part) for name in self.hf])

    def _read(self, weights: FolderWeights, name: str, part: tuple[int, int]) -> Tensor:
        if self.cut is None or part[1] == 1 or name not in weights.shapes:
            return weights.read(name)
        pieces = [weights.read(name, at) for at in self.cut.slices(weights.shapes[name], *part)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.cut.dim)

    def shapes(self, parameters: Mapping[str, Tensor], size: int = 1) -> dict[str, list[int]]:
        """Shape of each whole Hugging Face tensor, from the parameters of one of `size` tensor-parallel ranks."""
        out = {}
        for name, tensor in zip(self.hf, self.split([parameters[n].to("meta") for n in self.megatron]), strict=True):
            out[name] = list(tensor.shape)
            if self.cut is not None:
                out[name][self.cut.dim] *= size
        return out


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
    def of(cls, keys: Iterable[str], source: str, family: Family | None = None) -> TensorNames:
        """Find out from the keys themselves.

        Args:
            keys: names of all tensors of a folder.
            source: named in the error.
            family: of the model; needed where it has towers.

        Raises:
            ConfigError: no token embedding among them.
        """
        keys = list(keys)
        keys = sorted(set(keys) - untrained(keys))
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
            fused_experts=any(k.endswith("mlp.experts.gate_up_proj") for k in keys),
        )


def untrained(names: Iterable[str]) -> set[str]:
    """Names of tensors that belong to other parts of a whole model, such as the talker, and stay as they are."""
    names = list(names)
    prefixes = [f.whole.prefix for f in TABLE.values() if f.whole is not None]
    prefix = next((p for p in prefixes if any(name.startswith(p) for name in names)), "")
    return {name for name in names if not name.startswith(prefix)}


def _same(tensors: Tensors) -> Tensors:
    return list(tensors)


def _one(megatron: str, hf: str, cut: Cut | None = None) -> Link:
    return Link((megatron,), (hf,), _same, _same, cut)


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
                ROWS,
            )
        )
    links.append(_one(f"{megatron}self_attention.linear_proj.weight", f"{hf}self_attn.o_proj.weight", COLUMNS))
    if family.qk_norm:
        links += [_one(f"{megatron}self_attention.{x}_layernorm.weight", f"{hf}self_attn.{x}_norm.weight") for x in "qk"]
    return links


def _mlp_links(hf: str, megatron: str) -> list[Link]:
    return [
        Link(
            (f"{megatron}linear_fc1.weight",),
            (f"{hf}gate_proj.weight", f"{hf}up_proj.weight"),
            lambda tensors: [torch.cat(tensors)],
            lambda tensors: list(tensors[0].chunk(2)),
            ROWS,
        ),
        _one(f"{megatron}linear_fc2.weight", f"{hf}down_proj.weight", COLUMNS),
    ]


def _expert_links(c: Any, hf: str, megatron: str, fused: bool) -> list[Link]:
    expert = [f"{megatron}experts.local_experts.{e}." for e in range(c.num_experts)]
    links = [_one(f"{megatron}router.weight", f"{hf}gate.weight")]
    if not fused:
        for e, name in enumerate(expert):
            links += _mlp_links(f"{hf}experts.{e}.", name)
        return links
    for theirs, ours, cut in (("gate_up_proj", "linear_fc1", Cut(1, blocks=2)), ("down_proj", "linear_fc2", Cut(2))):
        links.append(
            Link(
                tuple(f"{name}{ours}.weight" for name in expert),
                (f"{hf}experts.{theirs}",),
                lambda tensors: list(tensors[0].unbind()),
                lambda tensors: [torch.stack(tensors)],
                cut,
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
    family = family_of(hf_config.model_type)
    c = family.text(hf_config)
    links = [
        _one(f"{prefix}embedding.word_embeddings.weight", f"{named.text}embed_tokens.weight", ROWS),
        _one(f"{prefix}decoder.final_layernorm.weight", f"{named.text}norm.weight"),
    ]
    if not hf_config.tie_word_embeddings:
        if named.head is None:
            raise ConfigError(f"{hf_config.model_type}: no lm_head.weight, but tie_word_embeddings is False")
        links.append(_one(f"{prefix}output_layer.weight", named.head, ROWS))
    for i, sparse in enumerate(moe_layers(c)):
        hf, megatron = f"{named.text}layers.{i}.", f"{prefix}decoder.layers.{i}."
        links.append(_one(f"{megatron}input_layernorm.weight", f"{hf}input_layernorm.weight"))
        links.append(_one(f"{megatron}pre_mlp_layernorm.weight", f"{hf}post_attention_layernorm.weight"))
        links += _attention_links(c, family, hf, megatron)
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


FLOATS = ("F64", "F32", "F16", "BF16")


def check_weights(
    links: Sequence[Link], weights: FolderWeights, parameters: Mapping[str, Tensor], part: tuple[int, int] = WHOLE
) -> None:
    """Compare names, shapes and dtypes of a folder with a model, before anything is read.

    Args:
        links: of the model.
        weights: of the folder.
        parameters: of this rank, by Megatron's names.
        part: rank and size of the tensor-parallel group.

    Raises:
        ConfigError: weights are missing, some belong nowhere, or one has another shape or dtype; the file and tensor are named.
    """
    shapes = {name: shape for link in links for name, shape in link.shapes(parameters, part[1]).items()}
    tied = {name for name in weights.shapes if name.endswith("lm_head.weight")}
    others = tied | untrained(weights.shapes)
    missing, unexpected = sorted(shapes.keys() - weights.shapes.keys()), sorted(weights.shapes.keys() - shapes.keys() - others)
    if missing or unexpected:
        raise ConfigError(
            f"{weights.folder}: {len(missing)} weights are missing {missing[:4]} and {len(unexpected)} belong nowhere "
            f"{unexpected[:4]}; config.json must be that of these weights"
        )
    for name, shape in shapes.items():
        if weights.shapes[name] != shape:
            raise ConfigError(
                f"{weights.where(name)} has shape {weights.shapes[name]}, and config.json wants {shape}; "
                "one of them is of another model"
            )
        if weights.dtypes[name] not in FLOATS:
            raise ConfigError(
                f"{weights.where(name)} has dtype {weights.dtypes[name]}; allowed: {', '.join(FLOATS)}. Quantised weights "
                "cannot be trained: name the folder that they were made from"
            )


class HfWeights(Mapping[str, Tensor]):
    """Megatron parameters under Hugging Face names; a tensor is a view of its parameter wherever possible.

    Those that are no view are made when they are asked for, and those of one link are kept at a time.
    """

    def __init__(self, links: Sequence[Link], parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._links = {name: link for link in links for name in link.hf}
        self._kept: tuple[Link, dict[str, Tensor]] | None = None

    def like(self) -> dict[str, Tensor]:
        """All tensors on the meta device: shapes and dtypes alone."""
        meta = {name: tensor.to("meta") for name, tensor in self._parameters.items()}
        return dict(HfWeights([*self._links.values()], meta))

    def __getitem__(self, name: str) -> Tensor:
        link = self._links[name]
        if self._kept is None or self._kept[0] is not link:
            self._kept = None  # before others take its place
            made = link.split([self._parameters[n] for n in link.megatron])
            self._kept = link, dict(zip(link.hf, made, strict=True))
        return self._kept[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._links)

    def __len__(self) -> int:
        return len(self._links)


class WithUntrained(Mapping[str, Tensor]):
    """Trained weights, and those of a folder's other parts as they are there; what an export writes.

    Args:
        trained: under Hugging Face names.
        weights: of the folder that the model was loaded from.
    """

    def __init__(self, trained: HfWeights, weights: FolderWeights) -> None:
        self._trained, self._weights = trained, weights
        self._others = sorted(untrained(weights.shapes))

    def like(self) -> dict[str, Tensor]:
        """All tensors on the meta device: shapes and dtypes alone."""
        return self._trained.like() | {name: self._weights.read(name).to("meta") for name in self._others}

    def __getitem__(self, name: str) -> Tensor:
        return self._trained[name] if name in self._trained else self._weights.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._trained, *self._others])

    def __len__(self) -> int:
        return len(self._trained) + len(self._others)

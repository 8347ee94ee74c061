"""The memory of every trainer rank, from a model's configuration alone: which layouts fit a number of devices.

Weights, gradients and optimizer are counted from the shapes of the model's tensors (transformers' model on the meta device),
each divided as the trainer divides it. Activations are those that a decoder layer keeps for its backward pass, tensor by
tensor, for forests of `token_budget` tokens. `tests/training/test_memory_plan.py` holds both against real allocations.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from relax_sdk.config import TrainingConfig
from relax_sdk.errors import ConfigError
from relax_sdk.layout import LayoutConfig
from relax_sdk.planning import MemoryPlan, PlannedLayout, PlannedRank, PlanRequest
from relax_server.models.families import Family, family_of, trained_part
from relax_server.training.megatron.config import check_layout, head_dim, moe_layers, stages

LOGITS_AT_ONCE = 2**25
"""As in `training.scoring`, which needs Megatron's process to be imported."""
LOGIT_COPIES = 4
"""Tensors in float32 of the logits that are computed at once: logits, logprobs, their slopes, and one in between."""
ROOM = 0.92
"""Share of a device that is planned with: the rest is for the driver, libraries and fragments of memory."""
DIVIDED = ("q_proj.", "k_proj.", "v_proj.", "o_proj.weight", "gate_proj.", "up_proj.", "down_proj.weight")
"""Parts of a decoder layer that tensor parallelism divides."""


@dataclass(frozen=True)
class LayoutPlan:
    """One layout, and what each of its ranks holds."""

    layout: LayoutConfig
    ranks: tuple[PlannedRank, ...]
    """By pipeline stage: all other ranks of a stage are alike."""
    refused: str = ""
    """Why the model cannot be divided so; empty: it can."""

    @property
    def largest(self) -> int:
        """Bytes of the fullest rank."""
        return max((rank.total for rank in self.ranks), default=0)


@dataclass(frozen=True)
class Tensors:
    """Numbers of a rank's parameters, by what divides their gradients and optimizer state."""

    dense: int
    expert: int

    def __add__(self, other: Tensors) -> Tensors:
        return Tensors(self.dense + other.dense, self.expert + other.expert)

    @property
    def all(self) -> int:
        return self.dense + self.expert


@dataclass(frozen=True)
class Model:
    """What a plan needs to know of a model."""

    config: Any
    """The language model's part of the configuration."""
    family: Family
    shapes: dict[str, tuple[int, ...]] = field(repr=False)
    """Shapes of all parameters, by transformers' names."""
    tied: bool

    @classmethod
    def of(cls, hf_config: Any) -> Model:
        """Build the model on the meta device, which takes no memory.

        Raises:
            ConfigError: an architecture that is not in the table.
        """
        import torch

        hf_config = trained_part(hf_config)
        family = family_of(hf_config.model_type)
        built = family.model_class()
        make = built._from_config if hasattr(built, "_from_config") else built.from_config
        with torch.device("meta"):
            model = make(hf_config)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        return cls(family.text(hf_config), family, shapes, bool(hf_config.tie_word_embeddings))

    def layer(self, number: int, layout: LayoutConfig) -> Tensors:
        """One decoder layer's part of a rank."""
        prefix = re.compile(rf"(.*\.)?layers\.{number}\.")
        return sum((self._part(n, s, layout) for n, s in self._decoder() if prefix.match(n)), Tensors(0, 0))

    def ends(self, first: bool, last: bool, layout: LayoutConfig) -> Tensors:
        """What the first and the last pipeline stage hold beside their layers: embedding, towers; norm, output layer."""
        dense = 0
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            if self._is_tower(name):
                dense += size if first else 0
            elif name.endswith("embed_tokens.weight"):
                dense += size // layout.tp * (int(first) + int(last and self.tied and not first))
            elif name.startswith("lm_head."):
                dense += size // layout.tp if last else 0
            elif ".layers." not in name:
                dense += size if last else 0
        return Tensors(dense, 0)

    def _is_tower(self, name: str) -> bool:
        return "visual." in name or "audio_tower." in name

    def _decoder(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        return ((n, s) for n, s in self.shapes.items() if not self._is_tower(n))

    def _part(self, name: str, shape: tuple[int, ...], layout: LayoutConfig) -> Tensors:
        size = math.prod(shape)
        if ".experts." in name:
            return Tensors(0, size // (layout.ep * layout.etp))
        return Tensors(size // layout.tp if any(part in name for part in DIVIDED) else size, 0)


def layer_bytes(model: Model, sparse: bool, tokens: int, layout: LayoutConfig, training: TrainingConfig, flex: bool) -> int:
    """Bytes that one decoder layer keeps for its backward pass, for a forest of so many tokens.

    Dense blocks keep a mask in the dtype of the model, and shared prefixes once per block. That depends on the forest, and is
    counted for one sequence without branches, whose mask is [t, t].
    """
    c, e = model.config, 2 if training.dtype == "bfloat16" else 4
    h, d = c.hidden_size, head_dim(c)
    heads, groups = c.num_attention_heads // layout.tp, max(1, c.num_key_value_heads // layout.tp)
    t = tokens // layout.cp
    own = t // layout.tp if layout.sequence_parallel else t
    if training.recompute:
        return own * h * e
    norms = 2 * own * (2 * h * 4 + 4 + h * e)  # norms are computed in float32
    normed = 0
    if model.family.qk_norm:
        before = 4 * groups * d if e == 2 else 4 * (heads + 2 * groups) * d  # in float32 it is a view of all that was projected
        normed = t * (4 * (2 * heads + groups) * d + before + 4 * (heads + groups))
    rope = t * 4 * d * e
    keys = 2 * (groups if flex else heads) * d * e * (tokens if layout.cp > 1 else t)
    mask = 0 if flex else t * tokens * e
    attention = mask + normed + rope + keys + t * (3 * heads * d * e + 4 * heads)
    if not sparse:
        return norms + attention + t * e * 5 * c.intermediate_size // layout.tp
    k, f = c.num_experts_per_tok, c.moe_intermediate_size // layout.etp
    routed = k * (t if layout.etp > 1 else own)
    router = own * (24 * k + 5 * c.num_experts)
    return norms + attention + router + routed * e * (h + 6 * f)


def plan_layout(model: Model, layout: LayoutConfig, training: TrainingConfig, *, reference: bool, flex: bool) -> LayoutPlan:
    """What each rank of a layout holds in a training step; media towers' activations, which follow the media, are not in it.

    Args:
        model: what is trained.
        layout: how its ranks share it.
        training: token budget, precision, recomputation.
        reference: the policy keeps a frozen copy of its weights (`algorithm.kl_coef` above 0 with `bus="local"`).
        flex: layers attend by FlexAttention, as on a GPU.
    """
    try:
        check_layout(model.config, layout)
        parts = stages(model.config.num_hidden_layers, layout.pp)
    except ConfigError as error:
        return LayoutPlan(layout, (), str(error))
    return LayoutPlan(layout, tuple(_rank(model, layout, training, reference, flex, i, parts) for i in range(layout.pp)))


def _rank(
    model: Model, layout: LayoutConfig, training: TrainingConfig, reference: bool, flex: bool, stage: int, parts: list[range]
) -> PlannedRank:
    """A rank of one pipeline stage."""
    half = training.dtype == "bfloat16"
    e, last = 2 if half else 4, stage == layout.pp - 1
    own = sum((model.layer(i, layout) for i in parts[stage]), model.ends(stage == 0, last, layout))
    states = 12 if half else 8  # two moments, and a master where weights are in bfloat16
    copies = (layout.dp * layout.cp, max(1, layout.tp * layout.cp * layout.dp // (layout.ep * layout.etp)))
    divided = copies if layout.distributed_optimizer else (1, 1)
    tokens, sparse, c = training.token_budget, moe_layers(model.config), model.config
    kept = sum(layer_bytes(model, sparse[i], tokens, layout, training, flex) for i in parts[stage])
    if training.recompute:  # one layer at a time is computed again
        whole = dataclasses.replace(training, recompute=False)
        kept += max(layer_bytes(model, sparse[i], tokens, layout, whole, flex) for i in parts[stage])
    else:
        kept += end_bytes(model, tokens, layout) if last else 0
    in_flight = min(layout.pp - stage, layout.pp)
    at_once = min(tokens * c.vocab_size // layout.tp, LOGITS_AT_ONCE)
    blocks = (-(-tokens // 128)) ** 2
    return PlannedRank(
        stage=stage,
        weights=own.all * e,
        gradients=own.all * 4,
        optimizer=own.dense * states // divided[0] + own.expert * states // divided[1],
        reference=own.all * e if reference else 0,
        activations=kept * in_flight,
        logits=at_once * 4 * LOGIT_COPIES if last else 0,
        attention_plan=16 * blocks if flex else 24 * tokens,
        offloaded=training.offload == "optimizer",
    )


def end_bytes(model: Model, tokens: int, layout: LayoutConfig) -> int:
    """Bytes that the last norm, and the numbers of tokens and rows, keep for the backward pass."""
    t = tokens // layout.cp
    own = t // layout.tp if layout.sequence_parallel else t
    return own * (2 * model.config.hidden_size * 4 + 4) + 16 * t


def layouts(devices: int) -> Iterator[LayoutConfig]:
    """All layouts of so many ranks, the divided optimizer wherever there is data parallelism."""
    for tp, pp, cp in itertools.product(_divisors(devices), repeat=3):
        if devices % (tp * pp * cp) == 0:
            dp = devices // (tp * pp * cp)
            for ep in _divisors(tp * cp * dp):
                yield LayoutConfig(tp=tp, pp=pp, cp=cp, ep=ep, dp=dp, distributed_optimizer=dp * cp > 1)


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def fitting(
    model: Model,
    devices: int,
    device_bytes: int,
    training: TrainingConfig,
    *,
    reference: bool,
    only: LayoutConfig | None = None,
) -> list[LayoutPlan]:
    """Layouts that fit, best first: those that divide least over what is slow, so most over `dp`, then `ep`, `tp`, `pp`, `cp`.

    Args:
        model: what is trained.
        devices: at most so many ranks; all of them are used.
        device_bytes: memory of one device.
        training: token budget, precision, recomputation.
        reference: as for `plan_layout`.
        only: this layout alone, also if it does not fit.
    """
    if only is not None:
        return [plan_layout(model, only, training, reference=reference, flex=True)]
    found = [plan_layout(model, layout, training, reference=reference, flex=True) for layout in layouts(devices)]
    fit = [plan for plan in found if not plan.refused and plan.largest <= ROOM * device_bytes]

    def cost(plan: LayoutPlan) -> tuple[int, ...]:
        own = plan.layout
        return (own.cp, own.pp, own.tp, own.ep, plan.largest)

    return sorted(fit, key=cost)


def plan(request: PlanRequest) -> MemoryPlan:
    """Answer `relax plan`.

    Raises:
        ConfigError: a model that cannot be trained, or the layout that is asked for cannot be had with it.
    """
    from transformers import AutoConfig

    from relax_server.models.catalog import resolve_model

    model = Model.of(AutoConfig.from_pretrained(resolve_model(request.model), local_files_only=True))
    found = fitting(
        model, request.devices, request.device_bytes, request.training, reference=request.reference, only=request.layout
    )
    if request.layout is not None and found[0].refused:
        raise ConfigError(found[0].refused)
    room = ROOM * request.device_bytes
    parameters = sum(math.prod(shape) for shape in model.shapes.values())
    return MemoryPlan(
        parameters=parameters,
        kv_bytes_per_token=kv_bytes_per_token(model, request.training),
        engine_weights=parameters * (2 if request.training.dtype == "bfloat16" else 4),
        layouts=tuple(PlannedLayout(p.layout, p.ranks, p.largest <= room) for p in found),
    )


def kv_bytes_per_token(model: Model, training: TrainingConfig) -> int:
    """Bytes of keys and values of one token in an engine with the whole model."""
    c, e = model.config, 2 if training.dtype == "bfloat16" else 4
    return 2 * c.num_hidden_layers * c.num_key_value_heads * head_dim(c) * e

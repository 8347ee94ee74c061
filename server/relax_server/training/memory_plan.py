"""The memory of every trainer rank, from a model's configuration alone: which layouts fit a number of devices.

Weights, gradients and optimizer are counted from the shapes of the model's tensors (transformers' model on the meta device),
each divided as the trainer divides it. Activations are those that a decoder layer keeps for its backward pass, tensor by
tensor, for forests of `token_budget` tokens. What media towers keep is measured, see `planned_towers`.
`tests/training/test_memory_plan.py` and `test_towers.py` hold all three against real allocations.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from relax_sdk.config import TrainingConfig
from relax_sdk.errors import ConfigError
from relax_sdk.layout import LayoutConfig
from relax_sdk.planning import MemoryPlan, PlannedLayout, PlannedRank, PlanRequest
from relax_sdk.tuning import Tuning
from relax_server.models.division import check_layout, moe_layers, stage_parts
from relax_server.models.layout import hf_config
from relax_server.training.attention_way import attention_way
from relax_server.training.megatron.config import head_dim
from relax_server.training.planned_model import Model
from relax_server.training.planned_towers import chunk_tokens, kept_of_media, tower_bytes_per_token

LOGITS_AT_ONCE = 2**25
"""As in `training.scoring`, which needs Megatron's process to be imported."""
LOGIT_COPIES = 4
"""Tensors in float32 of the logits that are computed at once: logits, logprobs, their slopes, and one in between."""
ROOM = 0.92
"""Share of a device that is planned with: the rest is for the driver, libraries and fragments of memory."""


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


def layer_bytes(
    model: Model, sparse: bool, tokens: int, layout: LayoutConfig, training: TrainingConfig, flex: bool, tuning: Tuning
) -> int:
    """Bytes that one decoder layer keeps for its backward pass, for a forest of so many tokens.

    Dense blocks keep a mask in the dtype of the model, and shared prefixes once per block. That depends on the forest, and is
    counted for one sequence without branches, whose mask is [t, t].
    """
    c, e = model.config, 2 if training.dtype == "bfloat16" else 4
    h, d = c.hidden_size, head_dim(c)
    heads, groups = c.num_attention_heads // layout.tp, max(1, c.num_key_value_heads // layout.tp)
    t = tokens // layout.cp
    own = t // layout.tp if layout.sequence_parallel else t
    if training.recompute is True:
        return own * h * e
    products = 0 if tuning.has_lora else 1  # of numbers and weight, which are for the gradient of a norm's weight
    norms = 2 * own * ((1 + products) * h * 4 + 4 + h * e)  # norms are computed in float32
    normed = 0
    if model.family.qk_norm:
        before = 4 * groups * d if e == 2 else 4 * (heads + 2 * groups) * d  # in float32 it is a view of all that was projected
        normed = t * (4 * heads * d + 4 * products * (heads + groups) * d + before + 4 * (heads + groups))
    rope = t * 4 * d * e
    core = t * 2 * (heads + groups) * d * e if training.recompute else core_bytes(model, t, layout, e, flex)
    inner = 4 * t * tuning.lora.rank * e if tuning.adapts("attention") else 0  # A x, for q, k, v and o
    attention = normed + rope + core + inner
    if not sparse:
        inner = 3 * t * tuning.lora.rank * e if tuning.adapts("mlp") else 0
        return norms + attention + inner + t * e * 5 * c.intermediate_size // layout.tp
    k, f = c.num_experts_per_tok, c.moe_intermediate_size // layout.etp
    routed = k * (t if layout.etp > 1 else own)
    router = own * (24 * k + 5 * c.num_experts)
    inner = 3 * routed * tuning.lora.rank * e if tuning.adapts("experts") else 0
    return norms + attention + router + inner + routed * e * (h + 6 * f)


def core_bytes(model: Model, queries: int, layout: LayoutConfig, e: int, flex: bool) -> int:
    """Bytes that the attention of one decoder layer keeps between its projections, in a type of `e` bytes."""
    c, d = model.config, head_dim(model.config)
    heads, groups = c.num_attention_heads // layout.tp, max(1, c.num_key_value_heads // layout.tp)
    tokens = queries * layout.cp
    keys = 2 * (groups if flex else heads) * d * e * tokens
    mask = 0 if flex else queries * tokens * e
    return mask + keys + queries * (3 * heads * d * e + 4 * heads)


def plan_layout(
    model: Model,
    layout: LayoutConfig,
    training: TrainingConfig,
    *,
    reference: bool,
    flex: bool,
    tuning: Tuning | None = None,
    towers: int = 0,
) -> LayoutPlan:
    """What each rank of a layout holds in a training step.

    Args:
        model: what is trained.
        layout: how its ranks share it.
        training: token budget, precision, recomputation.
        reference: the policy keeps a frozen copy of what it trains (`algorithm.kl_coef` above 0 with `bus="local"`).
        flex: layers attend by FlexAttention, as on a GPU.
        tuning: what is trained; None: everything.
        towers: bytes that the towers keep for the media of one forest, see `planned_towers`.
    """
    tuning = tuning or Tuning()
    try:
        check_layout(model.config, layout)
    except ConfigError as error:
        return LayoutPlan(layout, (), str(error))
    ranks = (_rank(model, layout, training, tuning, reference, flex, towers, stage) for stage in range(layout.pp))
    return LayoutPlan(layout, tuple(ranks))


def _rank(
    model: Model,
    layout: LayoutConfig,
    training: TrainingConfig,
    tuning: Tuning,
    reference: bool,
    flex: bool,
    towers: int,
    stage: int,
) -> PlannedRank:
    """A rank of one pipeline stage."""
    half = training.dtype == "bfloat16"
    e, last = 2 if half else 4, stage == layout.pp - 1
    first = stage == 0
    parts = stage_parts(model.config.num_hidden_layers, layout, stage)
    layers = [i for part in parts for i in part]
    own = sum((model.layer(i, layout) for i in layers), model.ends(first, last, layout))
    adapters = model.adapters(layers, first, layout, tuning)
    frozen = own if tuning.has_lora else model.towers(lambda tower: first and not tuning.trains_whole(tower))
    whole = model.towers(lambda tower: first and tuning.has_lora and tuning.trains_whole(tower))
    trained = own - frozen + whole + adapters
    states = 12 if half else 8  # two moments, and a master where weights are in bfloat16
    alive = in_flight(layout, stage)
    copies = (layout.dp * layout.cp, max(1, layout.tp * layout.cp * layout.dp // (layout.ep * layout.etp)))
    divided = copies if layout.distributed_optimizer else (1, 1)
    tokens, sparse, c = training.token_budget, moe_layers(model.config), model.config
    kept = sum(
        forests * sum(layer_bytes(model, sparse[i], tokens, layout, training, flex, tuning) for i in part)
        for part, forests in zip(parts, alive, strict=True)
    )
    if training.recompute:  # the layers of one forest are computed again one after the other
        kept += max(again_bytes(model, sparse[i], tokens, layout, training, flex, tuning) for i in layers)
    if training.recompute is not True:
        kept += end_bytes(model, tokens, layout, tuning) if last else 0
    at_once = min(tokens * c.vocab_size // layout.tp, LOGITS_AT_ONCE)
    blocks = (-(-tokens // 128)) ** 2
    return PlannedRank(
        stage=stage,
        weights=(own + adapters).all * e,
        gradients=trained.all * 4,
        optimizer=trained.dense * states // divided[0] + trained.expert * states // divided[1],
        reference=trained.all * e if reference else 0,
        activations=kept,
        towers=towers * alive[0] if first else 0,
        logits=at_once * 4 * LOGIT_COPIES if last else 0,
        attention_plan=16 * blocks if flex else 24 * tokens,
        offloaded=training.offload == "optimizer",
    )


def in_flight(layout: LayoutConfig, stage: int) -> list[int]:
    """Forests that each part of a pipeline stage keeps activations of at most at once, of those that have many to compute.

    Before its first backward pass a stage makes `pp - stage` forward passes, and an interleaved one
    `2 (pp - stage - 1) + (vpp - 1) pp + 1` of its parts, `pp` forests with each part in turn (arXiv 2104.04473, section 2.2).
    """
    if layout.vpp == 1:
        return [layout.pp - stage]
    passes = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1
    of = [number // layout.pp % layout.vpp for number in range(passes)]
    return [of.count(part) for part in range(layout.vpp)]


def again_bytes(
    model: Model, sparse: bool, tokens: int, layout: LayoutConfig, training: TrainingConfig, flex: bool, tuning: Tuning
) -> int:
    """Bytes of what is computed again of a decoder layer, for its backward pass; `tokens` as for `layer_bytes`."""
    plain = dataclasses.replace(training, recompute=False)
    if training.recompute is True:
        return layer_bytes(model, sparse, tokens, layout, plain, flex, tuning)
    return core_bytes(model, tokens // layout.cp, layout, 2 if training.dtype == "bfloat16" else 4, flex)


def end_bytes(model: Model, tokens: int, layout: LayoutConfig, tuning: Tuning) -> int:
    """Bytes that the last norm, and the numbers of tokens and rows, keep for the backward pass."""
    t = tokens // layout.cp
    own = t // layout.tp if layout.sequence_parallel else t
    return own * ((1 if tuning.has_lora else 2) * model.config.hidden_size * 4 + 4) + 16 * t


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
    tuning: Tuning | None = None,
    towers: int = 0,
) -> list[LayoutPlan]:
    """Layouts that fit, best first: those that divide least over what is slow, so most over `dp`, then `ep`, `tp`, `pp`, `cp`.

    Args:
        model: what is trained.
        devices: at most so many ranks; all of them are used.
        device_bytes: memory of one device.
        training: token budget, precision, recomputation.
        reference: as for `plan_layout`.
        only: this layout alone, also if it does not fit.
        tuning: what is trained; None: everything.
        towers: as for `plan_layout`.

    Raises:
        ConfigError: FlexAttention is asked for, and the model's heads have too few channels for it.
    """
    way = attention_way(training.attention, on_gpu=True, head_dim=head_dim(model.config), dtype=training.dtype)

    def planned(layout: LayoutConfig) -> LayoutPlan:
        flex = way == "flex" and layout.cp == 1  # a rank with some of the queries attends in blocks
        return plan_layout(model, layout, training, reference=reference, flex=flex, tuning=tuning, towers=towers)

    if only is not None:
        return [planned(only)]
    found = [planned(layout) for layout in layouts(devices)]
    fit = [plan for plan in found if not plan.refused and plan.largest <= ROOM * device_bytes]

    def cost(plan: LayoutPlan) -> tuple[int, ...]:
        own = plan.layout
        return (own.cp, own.pp, own.tp, own.ep, plan.largest)

    return sorted(fit, key=cost)


def plan(request: PlanRequest) -> MemoryPlan:
    """Answer `relax plan`.

    Raises:
        ConfigError: a model that cannot be trained; the layout that is asked for cannot be had with it; it has no tower for the
            media that are to be planned, or images and films have more tokens than a forest.
    """
    from relax_server.models.catalog import resolve_model

    model = Model.of(hf_config(resolve_model(request.model)))
    per_media_token = tower_bytes_per_token(model, request.training, request.tuning)
    found = fitting(
        model,
        request.devices,
        request.device_bytes,
        request.training,
        reference=request.reference,
        only=request.layout,
        tuning=request.tuning,
        towers=kept_of_media(request, per_media_token),
    )
    if request.layout is not None and found[0].refused:
        raise ConfigError(found[0].refused)
    room = ROOM * request.device_bytes
    parameters = sum(math.prod(shape) for shape in model.shapes.values())
    weights = parameters * (2 if request.training.dtype == "bfloat16" else 4)
    per_token = kv_bytes_per_token(model, request.training)
    return MemoryPlan(
        parameters=parameters,
        kv_bytes_per_token=per_token,
        engine_weights=weights,
        kv_tokens=max(0, int(room - weights) // per_token),
        layouts=tuple(PlannedLayout(p.layout, p.ranks, p.largest <= room) for p in found),
        tower_bytes_per_token=per_media_token,
        chunk_tokens=chunk_tokens(model),
    )


def kv_bytes_per_token(model: Model, training: TrainingConfig) -> int:
    """Bytes of keys and values of one token in an engine with the whole model."""
    c, e = model.config, 2 if training.dtype == "bfloat16" else 4
    return 2 * c.num_hidden_layers * c.num_key_value_heads * head_dim(c) * e

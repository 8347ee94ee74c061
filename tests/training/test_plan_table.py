"""`relax plan` against what every rank really holds: each architecture in each layout of the table in docs/layouts.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rank_workers import Ranks, begin
from relax_server.models.catalog import resolve_model
from relax_server.models.families import TABLE
from relax_server.models.families.page import LAYOUTS, refusal
from relax_server.training.memory_plan import in_flight, plan_layout
from relax_server.training.planned_model import Model

from benchmarks.layouts import MEASURED
from relax_sdk import TrainingConfig
from relax_sdk.layout import LayoutConfig

pytestmark = pytest.mark.nightly

Note = Callable[[str, object], None]

CLOSE = 0.1
"""Relative difference of the bytes of each kind."""
CELLS = [
    pytest.param(family, name, divided, id=f"{family} {name}{' divided optimizer' if divided else ''}")
    for family in TABLE
    for name, layout in LAYOUTS.items()
    if refusal(TABLE[family], layout) is None
    for divided in ([False, True] if layout.dp > 1 else [False])
]


def held(rank: int, layout: LayoutConfig, meeting: Path, name: str) -> dict[str, int]:
    """Bytes of a rank by kind after a step, and those that it keeps for the backward pass of a forest of text."""
    import torch
    from relax_server.training.batch import make_batch
    from relax_server.training.forest import pack
    from relax_server.training.megatron import parallel
    from training_data import conversation, kept_for_backward, letter_groups, make_policy, read

    from benchmarks.gpu_check import held_bytes

    begin(rank, layout, meeting)
    policy = make_policy(resolve_model(name), kl_coef=0.0)
    policy.train_step(letter_groups(policy.processor), read, 0)
    out = held_bytes(policy) | {"stage": parallel.stage()}
    sample = conversation(policy.processor, [(["a question " * 50], "answer")])
    forests = pack(make_batch([sample], policy.processor, {}), 10_000) * layout.dp
    mine = policy._mine(forests)[0]  # an interleaved pipeline is filled up with others
    activations = 0
    for (_, part), alive in zip(policy._loaded.model.named_parts(), in_flight(layout, parallel.stage()), strict=True):
        if not part.place.first:  # what the part before it has computed, of which the numbers do not matter
            hidden = torch.randn(part.micro_batch(mine).n_hidden, 1, part.config.hidden_size)
            part.set_input_tensor(hidden.requires_grad_())
        activations += alive * kept_for_backward(part, mine)
    return out | {"tokens": len(mine.ids) * layout.cp, "activations": activations}


@pytest.mark.parametrize(("family", "name", "divided"), CELLS)
def test_the_plan_is_what_each_rank_holds(ranks: Ranks, record_property: Note, family: str, name: str, divided: bool) -> None:
    found = compare(ranks, replace(LAYOUTS[name], distributed_optimizer=divided), TABLE[family].tiny)
    layout = f"{name}, divided optimizer" if divided else name
    record_property(MEASURED, json.dumps({"architecture": family, "layout": layout} | found))


@pytest.mark.parametrize("family", TABLE)
def test_the_plan_of_an_interleaved_pipeline_is_what_each_rank_holds(
    ranks: Ranks, deeper: Any, record_property: Note, family: str
) -> None:
    found = compare(ranks, LayoutConfig(pp=2, vpp=2), deeper(family, 4))
    record_property(MEASURED, json.dumps({"architecture": family, "layout": "`pp=2`, `vpp=2`"} | found))


def compare(ranks: Ranks, layout: LayoutConfig, name: str) -> dict[str, float]:
    """Compare the plan of every rank with what it holds.

    Returns:
        By kind, the largest relative difference of a rank: positive where more was planned.
    """
    from transformers import AutoConfig

    model = Model.of(AutoConfig.from_pretrained(resolve_model(name)))
    wrong: dict[str, tuple[int, int]] = {}
    found: dict[str, float] = {}
    measured = ranks.run(layout, held, name)
    if layout.ep > 1:  # a plan counts on tokens that are spread evenly over the experts, which a random router does not do
        mean = sum(real["activations"] for real in measured) / len(measured)
        measured = [real | {"activations": mean} for real in measured]
    for number, real in enumerate(measured):
        training = TrainingConfig(token_budget=real.get("tokens", 1024))
        planned = plan_layout(model, layout, training, reference=False, flex=False).ranks[real.pop("stage")]
        for kind in real.keys() - {"tokens"}:
            difference = getattr(planned, kind) - real[kind]
            if abs(difference) > CLOSE * real[kind]:
                wrong[f"{kind} of rank {number}"] = getattr(planned, kind), real[kind]
            found[kind] = max(found.get(kind, 0.0), difference / max(real[kind], 1), key=abs)
    assert not wrong, "planned, held"
    return found

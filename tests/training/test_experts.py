"""Experts in one grouped product: outputs and gradients are those of one after the other."""

from __future__ import annotations

from typing import Any

import pytest
from test_lora import EVERYWHERE, OMNI, samples_of, train
from training_data import make_policy, read

from relax_sdk import ConfigError
from relax_sdk.tuning import LoraConfig, Tuning


def products(frozen: bool) -> dict[str, float]:
    """Largest differences from one product after the other, with a group that has no rows."""
    import torch
    from relax_server.training.megatron.experts import grouped_product

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 16, generator=generator, requires_grad=True)
    weights = [torch.randn(24, 16, generator=generator, requires_grad=not frozen) for _ in range(4)]
    ends = torch.tensor([8, 8, 25, 40], dtype=torch.int32)
    slope = torch.randn(40, 24, generator=generator)
    given = [x, *(weights if not frozen else [])]
    out = grouped_product(x, ends, weights)
    ours = torch.autograd.grad(out, given, slope)
    parts = zip([0, *ends.tolist()], ends.tolist(), weights, strict=False)
    one_by_one = torch.cat([x[a:b] @ w.t() for a, b, w in parts])
    theirs = torch.autograd.grad(one_by_one, given, slope, allow_unused=True, materialize_grads=True)
    gaps = [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]
    return {"forward": float((out - one_by_one).abs().max()), "gradients": max(gaps)}


@pytest.mark.parametrize("frozen", [False, True])
def test_a_grouped_product_is_one_after_the_other(worker: Any, frozen: bool) -> None:
    assert all(gap < 1e-5 for gap in worker.run(products, frozen).values())


def steps(experts: str, tuning: Tuning, recompute: bool) -> tuple[list[float], int]:
    """Logprobs after two steps, and how many grouped products were made."""
    from relax_server.training.megatron import experts as module

    count, original = 0, module.grouped_product

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args)

    module.grouped_product = counted
    try:
        policy = train(make_policy(OMNI, tuning=tuning, eps=1e-3, experts=experts, recompute=recompute), 2)
        return [float(x) for values in policy.logprobs(samples_of(policy), read) for x in values], count
    finally:
        module.grouped_product = original


@pytest.mark.parametrize(
    ("tuning", "recompute", "is_grouped"),
    [
        (Tuning(), True, True),
        (Tuning(LoraConfig(rank=8)), False, True),
        (EVERYWHERE, False, False),  # rank 4 is too narrow for a GPU's kernel, so its experts go one after the other
    ],
)
def test_a_step_is_the_same(worker: Any, tuning: Tuning, recompute: bool, is_grouped: bool) -> None:
    wanted, none = worker.run(steps, "sequential", tuning, recompute)
    found, products = worker.run(steps, "grouped", tuning, recompute)
    assert none == 0 and (products > 0) == is_grouped
    assert found == pytest.approx(wanted, abs=1e-4)


def chosen(setting: str, dtype: str, widths: list[int], capability: tuple[int, int]) -> str:
    from unittest.mock import patch

    import torch
    from relax_server.training.megatron.experts import way

    with patch("torch.cuda.get_device_capability", lambda device: capability):
        return way(setting, torch.device("cuda"), getattr(torch, dtype), widths)  # type: ignore[arg-type]


def test_how_experts_are_computed_is_chosen_by_what_the_device_does(worker: Any) -> None:
    assert worker.run(chosen, "auto", "bfloat16", [2048, 768], (9, 0)) == "grouped"
    assert worker.run(chosen, "sequential", "bfloat16", [2048, 768], (9, 0)) == "sequential"
    for case, lacking in (
        (("float32", [2048, 768], (9, 0)), "training.dtype = 'bfloat16'"),
        (("bfloat16", [2048, 771], (9, 0)), "multiples of 8, and here they are"),
        (("bfloat16", [2048, 768], (7, 5)), "compute capability 8.0"),
    ):
        assert worker.run(chosen, "auto", *case) == "sequential"
        with pytest.raises(ConfigError, match=f"experts = 'grouped' needs .*{lacking}"):
            worker.run(chosen, "grouped", *case)

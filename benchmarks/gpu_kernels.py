"""Kernels that only a GPU has, beside what they take the place of: FlexAttention, and experts in one grouped product."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.gpu_rows import Row, seconds


def attention(small: bool) -> list[Row]:
    """Both ways of attention."""
    import torch
    from relax_server.models.device import this_device
    from relax_server.training.megatron import cpu

    cpu.install()
    device = this_device(torch.float32)
    shapes = [(300, 4, 2, 32)] if small else [(1000, 16, 8, 128), (8000, 16, 8, 128), (8000, 16, 4, 64)]
    return [row for shape in shapes for dtype in ("float32", "bfloat16") for row in one_attention(*shape, dtype, device)]


def one_attention(t: int, heads: int, groups: int, d: int, dtype: str, device: Any) -> list[Row]:
    """Both ways of attention for one shape."""
    import numpy as np
    import torch
    from relax_server.training.megatron.attention import attend
    from relax_server.training.megatron.flex import flex_mask

    end = torch.from_numpy(forest(t, np.random.default_rng(0))).to(device)
    inputs = [torch.randn(t, h, d, device=device, dtype=torch.float64) for h in (heads, groups, groups)]
    weight = torch.randn(t, heads * d, device=device, dtype=torch.float64)

    def compute(kind: torch.dtype, flex: Any, gradient: bool) -> list[torch.Tensor]:
        q, k, v = (x.detach().to(kind, copy=True).requires_grad_(gradient) for x in inputs)
        out = attend(q, k, v, end, None, flex=flex)
        slopes = torch.autograd.grad((out * weight.to(kind)).sum(), (q, k, v)) if gradient else ()
        return [out.detach(), *slopes]

    case, rows = f"{t} tokens, {heads}/{groups} heads of {d}, {dtype}", list[Row]()
    kind, wanted = getattr(torch, dtype), compute(torch.float64, None, True)
    bar = 2e-5 if dtype == "float32" else 3e-2
    for way in ("blocks", "flex"):
        gradient = way == "blocks" or device.type == "cuda"
        mask = flex_mask(end) if way == "flex" else None
        found = compute(kind, mask, gradient)  # on a GPU this compiles
        worst = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=False)]
        rows.append(Row("attention", case, f"{way}: result", worst[0], bar))
        if gradient:
            rows.append(Row("attention", case, f"{way}: gradient", max(worst[1:]), bar))
        else:
            rows.append(Row("attention", case, f"{way}: gradient", "not on a CPU"))
        rows.append(Row("attention", case, f"{way}: ms", 1e3 * seconds(functools.partial(compute, kind, mask, gradient))))
    return rows


def forest(t: int, rng: Any) -> Any:
    """`end` of trunks with a dozen branches each, int64 [t]."""
    import numpy as np

    end, at = np.empty(t, np.int64), 0
    while at < t:
        stop = min(t, at + int(rng.integers(t // 8, t // 4)))
        trunk = at + max(1, (stop - at) // 3)
        end[at:trunk] = stop
        while trunk < stop:
            after = min(stop, trunk + int(rng.integers(16, max(17, (stop - at) // 6))))
            end[trunk:after] = after
            trunk = after
        at = stop
    return end


def experts(small: bool) -> list[Row]:
    """The experts of a layer, one after the other and in one grouped product."""
    import torch
    from relax_server.models.device import this_device

    device = this_device(torch.float32)
    shapes = [(300, 4, 64, 96)] if small else [(8000, 128, 2048, 768), (64_000, 128, 2048, 768)]
    return [row for shape in shapes for row in one_mixture(*shape, device)]


def one_mixture(rows: int, groups: int, inputs: int, outputs: int, device: Any) -> list[Row]:
    """Both ways for one shape, some experts without a token; result and gradients against float64."""
    import torch
    from relax_server.training.megatron.experts import grouped_product

    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(0, groups - groups // 8, (rows,), generator=generator)
    ends = torch.bincount(chosen, minlength=groups).cumsum(0).to(torch.int32).to(device)
    x, slope = (torch.randn(rows, n, device=device, dtype=torch.float64) for n in (inputs, outputs))
    weights = torch.randn(groups, outputs, inputs, device=device, dtype=torch.float64) * inputs**-0.5

    def one_by_one(x: Any, ends: Any, weights: Any) -> Any:
        parts = x.tensor_split(ends[:-1].tolist())
        return torch.cat([part @ weight.t() for part, weight in zip(parts, weights, strict=True)])

    def compute(product: Any, kind: torch.dtype) -> list[torch.Tensor]:
        own = x.to(kind).requires_grad_()
        matrices = [w.to(kind).requires_grad_() for w in weights]
        out = product(own, ends, matrices)
        of_x, *of_weights = torch.autograd.grad(out, (own, *matrices), slope.to(kind))
        return [out.detach(), of_x, torch.stack(of_weights)]

    case, found = f"{rows} rows, {groups} experts, {inputs} to {outputs}", list[Row]()
    wanted = compute(one_by_one, torch.float64)
    for name, product in (("one by one", one_by_one), ("grouped", grouped_product)):
        ours = compute(product, torch.bfloat16)
        worst = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(ours, wanted, strict=True)]
        found.append(Row("experts", case, f"{name}: result", worst[0], 3e-2))
        found.append(Row("experts", case, f"{name}: gradients", max(worst[1:]), 3e-2))
        taken = 1e3 * seconds(functools.partial(compute, product, torch.bfloat16))
        found.append(Row("experts", case, f"{name}: ms", taken))
    return found

"""FlexAttention over forests against dense blocks, as far as a CPU has it: results, masks and the gradient of its reference.

`benchmarks.gpu_check` compares the kernels of a GPU, forward and backward.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_server.models.catalog import resolve_model
from relax_server.training.attention_way import attention_way
from training_data import conversation, make_policy, read

from relax_sdk import ConfigError


def random_ends(seed: int, least: int) -> list[int]:
    """`end` of a forest of random shape with at least so many tokens."""
    rng = np.random.default_rng(seed)
    end: list[int] = []

    def grow(depth: int) -> None:
        first = len(end)
        length = int(rng.choice([1, 3, 20, 90, 200]))
        end.extend([0] * length)
        for _ in range(int(rng.integers(0, 4)) if depth < 3 else 0):
            grow(depth + 1)
        end[first : first + length] = [len(end)] * length

    while len(end) < least:
        grow(0)
    return end


def compare(seed: int, least: int) -> dict[str, float]:
    """Largest differences of result and gradients, and tokens for which the blocks of the mask are wrong."""
    from unittest import mock

    import torch
    import torch.nn.attention.flex_attention as torch_flex
    from relax_server.training.megatron.attention import attend
    from relax_server.training.megatron.flex import BLOCK, flex_mask

    torch.manual_seed(seed)
    end = torch.tensor(random_ends(seed, least))
    t = len(end)
    mask: Any = flex_mask(end)
    n = mask.length
    padded = torch.cat([end, torch.arange(t + 1, n + 1)])
    index = torch.arange(n)
    sees = (index <= index[:, None]) & (index[:, None] < padded)
    blocks = sees.view(n // BLOCK, BLOCK, n // BLOCK, BLOCK).transpose(1, 2)
    seen, full = blocks.flatten(2).any(-1), blocks.flatten(2).all(-1)
    whole: Any = torch_flex.BlockMask.from_kv_blocks(
        mask.blocks.full_kv_num_blocks, mask.blocks.full_kv_indices, BLOCK_SIZE=BLOCK, seq_lengths=(n, n)
    )
    q, k, v = (torch.randn(t, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    weight = torch.randn(t, 64)
    results = []
    for flex in (None, mask):
        # PyTorch refuses a gradient on a CPU. Its reference has one all the same, and it shows mask and padding to be right.
        with mock.patch.object(torch_flex, "_validate_device", lambda *_: None):
            out = attend(q, k, v, end, 0.3, flex=flex)
        results.append((out.detach(), *torch.autograd.grad((out * weight).sum(), (q, k, v))))
    out, dq, dk, dv = (float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))
    return {
        "result": out,
        "gradient": max(dq, dk, dv),
        "blocks": float((mask.blocks.to_dense()[0, 0].bool() != seen).sum()),
        "full blocks": float((whole.to_dense()[0, 0].bool() != full).sum()),
    }


@pytest.mark.parametrize(("seed", "least"), [(0, 1), (1, 200), (2, 300), (3, 700), (4, 1200)])
def test_flex_attention_is_attention_in_blocks(worker, seed, least):
    found = worker.run(compare, seed, least)
    assert found["blocks"] == found["full blocks"] == 0
    assert found["result"] < 2e-6 and found["gradient"] < 5e-6, found


def lengths() -> list[int]:
    from relax_server.training.megatron.flex import padded_length

    return [padded_length(t) for t in range(1, 16_385)]


def test_forests_of_all_lengths_share_a_few_kernels(worker):
    padded = worker.run(lengths)
    assert all(t <= n < t * 1.25 + 128 and n % 128 == 0 for t, n in enumerate(padded, 1))
    assert len(set(padded)) <= 28


def model_with_flex(path: Path) -> dict[str, float]:
    """Hidden states of a whole model in both ways."""
    import torch
    from relax_server.training.batch import make_batch, read_features
    from relax_server.training.forest import pack
    from relax_server.training.megatron.trainer import forward

    policy = make_policy(path)
    samples = [conversation(policy.processor, [(["a question"], "A"), (["and"], text)]) for text in ("B", "BX", "C long")]
    (forest,) = pack(make_batch(samples, policy.processor, read_features(samples, policy.processor, read)), 100_000)
    model = policy._loaded.model
    micro = model.micro_batch(forest)
    assert micro.flex is None
    model.flex = True
    both: list[torch.Tensor] = []
    forward(model, [micro, model.micro_batch(forest)], lambda found, number: both.append(found.hidden))
    return {"difference": float((both[0] - both[1]).abs().max()), "scale": float(torch.stack(both).abs().max())}


def test_a_model_attends_by_the_mask_of_its_micro_batch(worker):
    found = worker.run(model_with_flex, resolve_model("relax/tiny-qwen3"))
    assert found["difference"] < 1e-5 * found["scale"], found


def train_with_flex(path: Path) -> None:
    make_policy(path, attention="flex")


def test_training_with_flex_attention_on_a_cpu_is_refused(worker):
    with pytest.raises(ConfigError, match=r"training\.attention = 'flex' needs an NVIDIA GPU"):
        worker.run(train_with_flex, resolve_model("relax/tiny-qwen3"))


def test_the_way_follows_the_device_the_heads_and_the_precision():
    def way(setting: Any, on_gpu: bool, head_dim: int, dtype: str = "bfloat16") -> str:
        return attention_way(setting, on_gpu=on_gpu, head_dim=head_dim, dtype=dtype)

    assert way("auto", False, 64) == "blocks"
    assert way("auto", True, 64) == "flex"
    assert way("auto", True, 8) == "blocks"
    assert way("auto", True, 64, "float32") == "blocks", "FlexAttention is exact there without the tensor cores, and slower"
    assert way("flex", True, 64, "float32") == "flex"
    assert way("blocks", True, 64) == "blocks"
    with pytest.raises(ConfigError, match=r"heads of 16 channels or more, and those of this model have 8"):
        way("flex", True, 8)

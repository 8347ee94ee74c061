"""The hash that SGLang's seeded sampling draws from, where there is no GPU kernel for it."""

import importlib.util
import struct

import torch
from relax_server.engines.sglang.environment import SHIM


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 of whole 4-byte blocks with seed 0, as Appleby published it."""
    mask, h = 0xFFFFFFFF, 0
    for (k,) in struct.iter_unpack("<I", data):
        k = k * 0xCC9E2D51 & mask
        k = ((k << 15) | (k >> 17)) & mask
        h ^= k * 0x1B873593 & mask
        h = ((h << 13) | (h >> 19)) & mask
        h = (h * 5 + 0xE6546B64) & mask
    h ^= len(data)
    h = (h ^ (h >> 16)) * 0x85EBCA6B & mask
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & mask
    return h ^ (h >> 16)


def test_seed_position_and_column_are_hashed_as_sglang_s_gpu_kernel_does():
    spec = importlib.util.spec_from_file_location("sgl_kernel_stand_in", SHIM / "sgl_kernel" / "__init__.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    seeds, positions = [0, 5, 2**31 - 1, 2**62 + 12_345], [0, 7, 123, 4095]
    hashed = torch.ops.sgl_kernel.murmur_hash32_cpu.default(
        torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.arange(40)
    )
    expected = [[murmur3(struct.pack("<QII", s, p, c)) for c in range(40)] for s, p in zip(seeds, positions, strict=True)]
    assert hashed.dtype == torch.uint32 and hashed.tolist() == expected
